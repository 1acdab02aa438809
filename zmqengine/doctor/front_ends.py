"""Findings of a front-end: whether it answers, serves a model, and is of this version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import zmqengine
from zmqengine.doctor.finding import Finding

ANSWER_S = 3.0


def look_at_front_end(url: str) -> Iterator[Finding]:
    """Look at the front-end at `url`. That none runs there is no failure."""
    url = url.rstrip("/")
    try:
        answer = _get(f"{url}/")
    except HTTPError as error:
        yield Finding("warn", "front-end", f"{url} answers {error.code}", "is it a front-end of zmqengine?")
        return
    except (URLError, OSError, ValueError):
        yield Finding("ok", "front-end", f"none runs at {url}; start one with `zmqengine serve`")
        return
    if not isinstance(answer, dict) or answer.get("name") != "zmqengine":
        yield Finding(
            "warn", "front-end", f"another program answers at {url}", "give --port to `zmqengine http`"
        )
        return
    if answer.get("version") != zmqengine.__version__:
        text = f"the front-end at {url} is version {answer.get('version')}, this is {zmqengine.__version__}"
        yield Finding("warn", "version", text, "update the older one")
    try:
        workers = _get(f"{url}/ready")["workers"]
    except HTTPError:
        text = f"the front-end at {url} has no worker that is ready"
        yield Finding("warn", "front-end", text, "start `zmqengine worker`, or wait until it has loaded")
        return
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(
            "warn", "front-end", f"{url}/ready does not answer as it should ({error})", "see its log"
        )
        return
    models = sorted({str(worker["model"]) for worker in workers if worker["ready"]})
    serves = f"serves {', '.join(models)}" if models else "loads models on demand"
    yield Finding("ok", "front-end", f"{url} {serves}; a browser may open it")


def _get(url: str) -> Any:
    # A local front-end is not reached through a proxy from the environment.
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers={"accept": "application/json"}), timeout=ANSWER_S) as response:
        return json.loads(response.read())
