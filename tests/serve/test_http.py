"""HTTP in front of a launcher: models are loaded by name, listed with their status, and outlive the launcher."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.serve.launching import LauncherProcess, fake, toml
from tests.support.adapters import write_opaque_adapter
from tests.support.ports import free_port
from tests.support.workers import START_S, wait_until
from zmqengine.serve.model import LULL_LEAST_S

pytestmark = pytest.mark.process

# A load of three steps.
SLOW = {"step_ms": 400}


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A launcher with HTTP in front."""

    def __init__(self, launched: LauncherProcess, port: int) -> None:
        self.launched = launched
        self.port = port

    def call(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            given = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, given, response.read())
        finally:
            connection.close()

    def complete(self, model: str | None, **more: Any) -> Answer:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, **more}
        return self.call("POST", "/v1/completions", body if model is None else {"model": model, **body})

    def states(self) -> dict[str, str]:
        """The status of every model."""
        return {card["id"]: card["status"]["value"] for card in self.call("GET", "/v1/models").json["data"]}

    @contextlib.contextmanager
    def events(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a stream of them, from now on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            yield (
                json.loads(line[6:]) for line in iter(response.readline, b"") if line.startswith(b"data: ")
            )
        finally:
            connection.close()

    @contextlib.contextmanager
    def stream(self, model: str, **more: Any) -> Iterator[http.client.HTTPResponse]:
        """The response of a completion that is streamed, none of it read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            body = {"model": model, "max_tokens": 4, "stream": True, **more}
            connection.request("POST", "/v1/completions", json.dumps(body))
            yield connection.getresponse()
        finally:
            connection.close()

    def wait_up(self) -> None:
        def is_up() -> bool:
            try:
                return self.call("GET", "/ready").status == 200
            except OSError:
                return False

        wait_until(is_up, self.launched.log)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Two models that fit together, one that fits alone, one that never fits, one that cannot load."""
    models = toml(
        {
            "small": {**fake(1), "aliases": ["gpt-4o", "tagged:latest"]},
            "other": fake(2, adapters=["odd"]),
            "slow": fake(1, **SLOW),
            "large": fake(50),
            "bad": fake(1, faults=[{"place": "next", "action": "exit", "times": None}]),
            "gone": {"path": "owner/not-here"},
            "calls": {"path": "pico-tools"},
        },
        memory="8G",
    )
    port = free_port()
    with LauncherProcess(
        models, "--port", str(port), http=True, ZMQENGINE_HTTP_KEEPALIVE_MS="100"
    ) as launched:
        site = Site(launched, port)
        site.wait_up()
        yield site


def test_commands_find_the_front_end_of_the_launcher(site: Site) -> None:
    """At its own port. `doctor` said that nothing runs, `launch` that nothing answers at port 8000."""
    url = f"http://localhost:{site.port}"
    looked = site.launched.command("doctor")
    assert "`zmqengine serve` runs with 7 models" in looked.stdout
    assert f"front-end: {url}" in looked.stdout
    assert "worker: none runs" not in looked.stdout
    launched = site.launched.command("launch", "llm", "--model", "small", "--anyway")
    assert launched.returncode == 0, launched.stderr
    assert f"at {url}" in launched.stdout


def test_a_port_in_use_and_a_second_launcher_are_told_before_the_banner(site: Site) -> None:
    """The banner named a URL that somebody else served."""
    second = site.launched.command("serve", str(site.launched.file), "--port", str(free_port()))
    assert second.returncode == 2
    assert second.stderr.startswith("zmqengine: a launcher is already running")
    assert len(second.stderr.splitlines()) == 1
    with tempfile.TemporaryDirectory(prefix="zs-") as directory:
        other = site.launched.environment | {"ZMQENGINE_DIR": directory}
        taken = subprocess.run(
            [sys.executable, "-m", "zmqengine.cli.main", "serve", "pico", "--port", str(site.port)],
            env=other, capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
    assert taken.returncode == 2
    assert len(taken.stderr.splitlines()) == 1
    assert f"port {site.port} of 127.0.0.1 is in use by another program: give another --port" in taken.stderr


def test_a_request_loads_the_model_that_it_names(site: Site) -> None:
    answer = site.complete("gpt-4o")
    assert answer.status == 200
    assert answer.json["model"] == "gpt-4o"
    assert answer.json["usage"]["completion_tokens"] == 4
    assert site.states()["small"] == "loaded"
    assert site.states()["gpt-4o"] == "loaded"


@pytest.mark.parametrize("name", ["small", "small:latest", "tagged:latest"])
@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_name_may_have_ollamas_tag(site: Site, path: str, name: str) -> None:
    """In every API: a model was loaded for a request that then was a 404. On the list, the tag is a part of a name."""
    answer = site.call("POST", path, {"model": name, "prompt": "a", "stream": False})
    assert answer.status == 200, answer.body


def test_a_model_is_loaded_for_a_request_that_names_it_with_an_adapter(site: Site) -> None:
    """Then the list has both; an adapter that it has not is a 404."""
    said = [site.complete(name, seed=1).json["choices"][0]["text"] for name in ("other:odd", "other")]
    assert said[0] != said[1]
    assert site.states()["other:odd"] == site.states()["other"] == "loaded"
    assert site.complete("other:even").status == 404


def test_a_misspelt_name_is_a_404_with_names_alike_and_loads_nothing(site: Site) -> None:
    answer = site.complete("smal")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert "did you mean small" in answer.json["error"]["message"]
    assert site.call("GET", "/v1/models/smal").status == 404


def test_a_misspelt_name_is_a_404_while_the_launcher_does_not_answer(site: Site) -> None:
    """It waited as long as a model may take to load; a loaded model is served."""
    assert site.complete("small").status == 200
    site.launched.process.send_signal(signal.SIGSTOP)
    try:
        assert site.complete("smal").status == 404
        assert site.complete("small").status == 200
    finally:
        site.launched.process.send_signal(signal.SIGCONT)
    wait_until(lambda: site.complete("smal").body.count(b"did you mean"), "the launcher answers again")


def test_a_model_that_never_fits_or_fails_is_refused_with_its_reason(site: Site) -> None:
    large, bad = site.complete("large"), site.complete("bad")
    assert (large.status, large.json["error"]["code"]) == (400, "never_fits")
    assert "50.00 GiB" in large.json["error"]["message"]
    assert (bad.status, bad.json["error"]["code"]) == (503, "model_load")
    assert bad.json["error"]["type"] == "service_unavailable_error"
    # A gateway may have it elsewhere; an SDK need not try again here, nor wait for a machine that is merely busy.
    assert (bad.headers["x-should-retry"], bad.headers.get("retry-after")) == ("false", None)
    body = {"model": "gone", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    gone = site.call("POST", "/v1/messages", body)
    assert (gone.status, gone.json["error"]["type"]) == (503, "api_error")
    assert "zmqengine pull owner/not-here" in gone.json["error"]["message"]
    assert site.call("GET", "/v1/models/gone").json["status"]["failed"] is True
    # The front-end hears of a state by its own subscription, which the refusal may overtake.
    failed = {"value": "unloaded", "failed": True, "exit_code": 86}
    wait_until(
        lambda: site.call("GET", "/v1/models/bad").json["status"] == failed, "bad is not said to have failed"
    )


def test_a_stream_is_kept_open_while_its_model_loads(site: Site) -> None:
    """Comments first, then the answer, on one response."""
    site.call("POST", "/v1/models/unload", {"model": "slow"})
    wait_until(lambda: site.states()["slow"] == "unloaded", "slow is not unloaded")
    answer = site.complete("slow", stream=True)
    assert answer.status == 200
    head, _, rest = answer.body.partition(b"data: ")
    assert head.count(b": keepalive\n\n") >= 1
    assert rest.endswith(b"data: [DONE]\n\n")
    refused = site.complete("slow", stream=True, max_tokens=0)
    assert refused.status == 400


def test_a_refusal_after_the_keep_alives_is_an_event(site: Site) -> None:
    site.call("POST", "/v1/models/unload", {"model": "slow"})
    wait_until(lambda: site.states()["slow"] == "unloaded", "slow is not unloaded")
    answer = site.complete("slow", stream=True, logit_bias={"999999": 1})
    assert answer.status == 200
    event = answer.body.split(b"event: error\ndata: ")[1]
    assert b"vocabulary" in event or json.loads(event)["error"]["code"]


def test_load_and_unload_in_the_forms_of_others(site: Site) -> None:
    assert site.call("POST", "/models/load", {"model": "other"}).json == {"success": True}
    loaded = site.call("POST", "/api/v1/models/load", {"model": "other", "ttl": 100}).json
    assert (loaded["instance_id"], loaded["status"]) == ("other", "loaded")
    listed = {model["key"]: model for model in site.call("GET", "/api/v1/models").json["models"]}
    assert listed["other"]["loaded_instances"] == [{"id": "other"}]
    running = {model["name"]: model for model in site.call("GET", "/api/ps").json["models"]}
    assert running["other"]["size_vram"] == 2 << 30
    assert site.call("POST", "/api/v1/models/unload", {"instance_id": "other"}).status == 200
    wait_until(lambda: site.states()["other"] == "unloaded", "other is not unloaded")
    assert "other" not in [model["name"] for model in site.call("GET", "/api/ps").json["models"]]
    tags = [model["name"] for model in site.call("GET", "/api/tags").json["models"]]
    assert "other" in tags
    assert "gone" not in tags, "what cannot be loaded is not offered"
    assert site.call("POST", "/models/load", {"model": "none"}).status == 404


def test_a_model_that_is_not_loaded_has_the_capabilities_of_its_files(site: Site) -> None:
    """An agent is set up with a model that takes tools, before any is loaded."""
    for name, capabilities in (("calls", ["completion", "tools"]), ("large", ["completion"])):
        assert site.states()[name] == "unloaded"
        assert site.call("POST", "/api/show", {"model": name}).json["capabilities"] == capabilities


def test_ollamas_keep_alive(site: Site) -> None:
    """An empty request loads; one with `keep_alive: 0` unloads."""
    loaded = site.call("POST", "/api/generate", {"model": "other:latest", "keep_alive": "10m0s"})
    assert loaded.json["done_reason"] == "load"
    assert site.states()["other"] == "loaded"
    card = site.call("GET", "/v1/models/other").json
    assert card["zmqengine"]["ttl_s"] == 600
    unloaded = site.call("POST", "/api/chat", {"model": "other", "keep_alive": 0})
    assert unloaded.json["done_reason"] == "unload"
    wait_until(lambda: site.states()["other"] == "unloaded", "other is not unloaded")


@pytest.mark.parametrize("field", [{"keep_alive": 0}, {"ttl": 0}])
def test_a_request_says_how_long_its_model_stays(site: Site, field: dict[str, int]) -> None:
    assert site.complete("other", **field).status == 200
    wait_until(lambda: site.states()["other"] == "unloaded", "other stays")
    assert site.complete("other", keep_alive="soon").status == 400


def test_events_tell_every_change(site: Site) -> None:
    site.call("POST", "/v1/models/unload", {"model": "other"})
    wait_until(lambda: site.states()["other"] == "unloaded", "other is not unloaded")
    with site.events("/v1/models/events") as ours, site.events("/models/sse") as llama:
        assert {model["id"] for model in next(ours)["models"]} >= {"small", "other", "large"}
        site.call("POST", "/v1/models/load", {"model": "other"})
        seen: list[str] = []
        while "loaded" not in seen:
            seen += [model["status"]["value"] for model in next(ours)["models"] if model["id"] == "other"]
        assert "loading" in seen
        statuses: list[dict[str, Any]] = []
        while not statuses or statuses[-1]["status"] != "loaded":
            event = next(llama)
            assert event["event"] == "model_status"
            statuses += [event["data"]] if event["model"] == "other" else []
        assert statuses[0] == {"status": "unloaded"}
        # An event tells other facts than the state, too: of an unloaded model, that its process is gone.
        assert [state for state, _ in itertools.groupby(each["status"] for each in statuses)] == [
            "unloaded", "loading", "loaded",
        ]  # fmt: skip
        assert all(each["progress"]["current"] for each in statuses if each["status"] == "loading")


def test_no_model_is_the_only_one_that_is_loaded(site: Site) -> None:
    for name, state in site.states().items():
        if state == "loaded" and name != "gpt-4o":
            site.call("POST", "/v1/models/unload", {"model": name})
    wait_until(lambda: "loaded" not in site.states().values(), "models stay")
    assert site.complete(None).status == 400
    assert site.complete("small").status == 200
    assert site.complete(None).json["model"] == "small"
    assert site.complete("default_model").status == 200


def test_a_front_end_that_dies_is_started_again(site: Site) -> None:
    front_end = next(
        process for process in site.launched.all_processes() if "--serve" in " ".join(process.cmdline())
    )
    front_end.kill()
    wait_until(lambda: "http has ended: starting it again" in site.launched.log, "it is not noticed")
    site.wait_up()
    assert site.complete("small").status == 200


def test_streams_outlive_the_launcher_and_the_next_one_takes_over() -> None:
    """SIGKILL of the launcher under 8 streams: every token comes, loaded models are served, others wait."""
    port = free_port()
    models = toml({"a": fake(1, step_ms=4), "b": fake(1)}, memory="8G")
    with (
        LauncherProcess(models, "--port", str(port), http=True) as launched,
        ThreadPoolExecutor(1) as threads,
        contextlib.ExitStack() as stack,
    ):
        site = Site(launched, port)
        site.wait_up()
        assert site.complete("a").status == 200
        streams = [
            stack.enter_context(site.stream("a", max_tokens=800, prompt=[n + 1], seed=n)) for n in range(8)
        ]
        assert all(stream.readline().startswith(b"data: {") for stream in streams)
        launched.kill()
        assert site.complete("a").status == 200
        waiting = threads.submit(site.complete, "b")
        launched.start_again()
        assert waiting.result(START_S).status == 200
        for stream in streams:
            body = stream.read()
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b"data: {") > 100
        assert launched.terminate() == 0
        assert launched.all_processes() == []


@pytest.mark.slow
def test_a_front_end_with_other_options_is_replaced_without_cutting_its_streams() -> None:
    """The next launcher has another port: the earlier front-end drains, the new one serves."""
    port, other = free_port(), free_port()
    models = toml({"a": fake(1, step_ms=10)}, memory="8G")
    with LauncherProcess(models, "--port", str(port), http=True) as launched:
        site = Site(launched, port)
        site.wait_up()
        assert site.complete("a").status == 200
        with site.stream("a", prompt=[1], max_tokens=500) as stream:
            assert stream.readline().startswith(b"data: {")
            launched.kill()
            launched.replace_argument(str(port), str(other))
            launched.start_again()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        again = Site(launched, other)
        again.wait_up()
        assert again.complete("a").status == 200


@pytest.mark.slow
def test_a_storm_over_two_models_is_answered_with_a_swap_a_spell() -> None:
    """Requests of two models that do not fit, in turn: each is answered, and they are collected."""
    port = free_port()
    models = toml({"a": fake(6), "b": fake(6)}, memory="8G")
    with (
        LauncherProcess(models, "--port", str(port), http=True) as launched,
        ThreadPoolExecutor(40) as threads,
    ):
        site = Site(launched, port)
        site.wait_up()
        began_s = time.monotonic()
        asked = [threads.submit(site.complete, "ab"[number % 2]) for number in range(80)]
        assert [answer.result(START_S).status for answer in asked] == [200] * 80
        lines = [line for line in launched.log.splitlines() if " ready model=" in line]
        # A model that nobody asks for any more leaves before the end of its spell, once.
        assert 2 <= len(lines) <= 3 + (time.monotonic() - began_s) / LULL_LEAST_S, lines


def test_requests_end_with_the_reason_when_their_model_fails() -> None:
    """When a worker dies for good, running streams and granted requests end: none waits for the next worker."""
    port = free_port()
    models = toml({"a": {**fake(1, step_ms=20), "restarts-max": 1}}, memory="8G")
    with (
        LauncherProcess(models, "--port", str(port), http=True) as launched,
        ThreadPoolExecutor(4) as threads,
    ):
        site = Site(launched, port)
        site.wait_up()
        assert site.complete("a").status == 200
        long = {"model": "a", "prompt": [1], "max_tokens": 4_000, "ignore_eos": True}
        plain = threads.submit(site.call, "POST", "/v1/completions", long)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({**long, "stream": True}))
            stream = connection.getresponse()
            assert stream.readline().startswith(b"data: ")
            for process in launched.all_processes():
                if process.cmdline()[-1] == "zmqengine.worker":
                    process.kill()
            late = threads.submit(site.complete, "a")
            last = stream.read().rsplit(b"data: ", 1)[1]
        assert "killed by SIGKILL" in json.loads(last)["error"]["message"]
        for answer in (plain.result(START_S), late.result(START_S)):
            assert (answer.status, answer.json["error"]["code"]) == (503, "model_load")


def test_a_request_that_waits_too_long_is_told_when_to_come_again() -> None:
    port = free_port()
    models = toml({"b": fake(6, **SLOW), "slower": fake(1, step_ms=60_000)}, memory="8G")
    with LauncherProcess(
        models, "--port", str(port), http=True, ZMQENGINE_HTTP_LOAD_WAIT_MS="300"
    ) as launched:
        site = Site(launched, port)
        site.wait_up()
        answer = site.complete("b")
        assert (answer.status, answer.json["error"]["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) >= 1
        body = {"model": "slower", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = site.call("POST", path, body)
            assert (refused.status, refused.json["error"]["type"]) == (529, "overloaded_error")


KEYS = ("first-long-key", "other-long-key")


@contextlib.contextmanager
def site_with_keys(**options: str) -> Iterator[Site]:
    """A pinned model and another one, for two keys."""
    models = toml({"pinned": {**fake(1), "pin": True}, "other": fake(1)}, memory="8G")
    port = free_port()
    keys = ",".join(KEYS)
    with LauncherProcess(
        models, "--port", str(port), http=True, ZMQENGINE_HTTP_API_KEYS=keys, **options
    ) as launched:
        site = Site(launched, port)
        site.wait_up()
        yield site


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    """A site of which no key is an operator's."""
    with site_with_keys() as site:
        yield site


UNLOADS: list[tuple[str, dict[str, object]]] = [
    ("/v1/models/unload", {}), ("/models/unload", {}), ("/api/v1/models/unload", {}),
    ("/api/generate", {"keep_alive": 0}),
]  # fmt: skip
LOADS: list[tuple[str, dict[str, object]]] = [
    ("/v1/models/load", {}),
    ("/models/load", {}),
    ("/api/v1/models/load", {}),
    ("/api/generate", {}),
]


@pytest.mark.parametrize(("path", "body"), UNLOADS)
def test_a_key_unloads_no_pinned_model(shared_site: Site, path: str, body: dict[str, object]) -> None:
    """It is there for all keys; another model is unloaded."""
    keys = [{"authorization": f"Bearer {key}"} for key in KEYS]
    for model, status in (("pinned", 403), ("other", 200)):
        answer = shared_site.call("POST", "/v1/completions", {"model": model, "prompt": "a"}, **keys[0])
        assert answer.status == 200, answer.body
        answer = shared_site.call("POST", path, {"model": model, **body}, **keys[1])
        assert answer.status == status, answer.body
    card = next(
        card
        for card in shared_site.call("GET", "/v1/models", **keys[0]).json["data"]
        if card["id"] == "pinned"
    )
    assert card["status"]["value"] == "loaded"


OPERATOR = "an-operators-key"


def test_an_operators_key_alone_loads_and_unloads() -> None:
    """Pinned models too. A request of another key still loads the model that it names, but says nothing of its stay."""
    operator, other = ({"authorization": f"Bearer {key}"} for key in (OPERATOR, KEYS[0]))
    with site_with_keys(ZMQENGINE_HTTP_OPERATOR_KEYS=OPERATOR) as site:

        def state(model: str) -> str:
            cards = site.call("GET", "/v1/models", **other).json["data"]
            return next(str(card["status"]["value"]) for card in cards if card["id"] == model)

        assert site.call("POST", "/v1/models/load", {"model": "other"}).status == 401
        for model, (path, body) in itertools.product(("pinned", "other"), LOADS + UNLOADS):
            answer = site.call("POST", path, {"model": model, **body}, **other)
            assert (answer.status, b"ask the operator" in answer.body) == (403, True), (path, answer.body)
        asked = {"model": "other", "prompt": "a", "keep_alive": 0}
        answer = site.call("POST", "/v1/completions", asked, **other)
        assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "keep_alive")
        assert state("other") == "loaded"
        for path, body in LOADS:
            assert site.call("POST", path, {"model": "pinned", **body}, **operator).status == 200
        wait_until(lambda: state("pinned") == "loaded", "the model is not loaded")
        assert site.call("POST", "/v1/models/unload", {"model": "pinned"}, **operator).status == 200
        wait_until(lambda: state("pinned") == "unloaded", "the model is not unloaded")
        assert site.call("POST", "/v1/completions", {**asked, "model": "pinned"}, **operator).status == 200


def test_an_operators_key_loads_adapters_of_a_model_that_is_loaded_for_it(tmp_path: Path) -> None:
    """The list has it while the model is there and when it is not."""
    operator, other = ({"authorization": f"Bearer {key}"} for key in (OPERATOR, KEYS[0]))
    adapter = {"model": "other", "lora_name": "new", "lora_path": write_opaque_adapter(tmp_path)}
    asked = {"model": "other:new", "prompt": "a", "max_tokens": 4}
    with site_with_keys(ZMQENGINE_HTTP_OPERATOR_KEYS=OPERATOR) as site:

        def listed() -> dict[str, str]:
            cards = site.call("GET", "/v1/models", **other).json["data"]
            return {card["id"]: card["status"]["value"] for card in cards}

        assert site.call("POST", "/v1/load_lora_adapter", adapter, **other).status == 403
        assert listed()["other"] == "unloaded"
        answer = site.call("POST", "/v1/load_lora_adapter", adapter, **operator)
        assert (answer.status, answer.json) == (200, {"success": True, "id": "other:new"})
        assert site.call("POST", "/v1/completions", asked, **other).status == 200
        facts = "/v1/models/other"
        # The launcher has heard of it.
        wait_until(
            lambda: site.call("GET", facts, **other).json["zmqengine"]["adapters"] == ["new"],
            "the launcher does not list the adapter",
        )
        assert site.call("POST", "/v1/models/unload", {"model": "other"}, **operator).status == 200
        wait_until(lambda: listed().get("other:new") == "unloaded", "the model is not unloaded")


BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/api/show", "/v1/models/load", "/v1/models/unload"]
)
@pytest.mark.parametrize("length", [600, 120_000, 3_000_000])
def test_a_name_that_no_model_can_have_is_a_404_at_once(site: Site, path: str, length: int) -> None:
    """A long one would end the connection to the launcher, for all requests, again and again."""
    answer = site.call("POST", path, {**BODIES.get(path, {}), "model": "x" * length})
    assert answer.status in (400, 404), answer.body[:300]
    assert len(answer.body) < 2000
    assert "no launcher" not in site.launched.log


def test_a_shown_name_that_is_misspelt_is_told_those_alike(site: Site) -> None:
    answer = site.call("POST", "/api/show", {"model": "smal"})
    assert answer.status == 404
    assert b"did you mean small" in answer.body


def test_who_has_no_key_learns_no_path(site: Site) -> None:
    """Probes need no key, so that supervisors have none."""
    assert str(site.launched.directory) not in site.call("GET", "/ready").body.decode()
