"""The chat page on a launcher: every model is offered with its state, and loaded by the first question or a button."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.page.browsers import KEYS, Browser, opened, until
from tests.http.page.steps import ANSWERED, fill, push, texts
from tests.serve.launching import LauncherProcess, fake, toml
from tests.serve.test_http import Site
from tests.support.ports import free_port

pytestmark = pytest.mark.process


@pytest.fixture
def window() -> Iterator[Browser]:
    with opened("chromium") as browser:
        yield browser


def states(browser: Browser) -> dict[str, str]:
    """What the list of models says of each."""
    names = texts(browser, "#model-list strong")
    return dict(zip(names, texts(browser, "#model-list .words > small:nth-child(2)"), strict=True))


def choose(browser: Browser, name: str) -> None:
    """Choose a model in the list."""
    browser.click("#model")
    browser.js(
        "[...document.querySelectorAll('#model-list .choice')]"
        ".find((each) => each.querySelector('strong').textContent === arguments[0]).click()",
        name,
    )


@pytest.mark.slow
def test_models_are_shown_with_their_state_and_loaded_by_a_question_or_a_button(window: Browser) -> None:
    port = free_port()
    models: dict[str, dict[str, Any]] = {
        "quick": {**fake(1), "aliases": ["gpt-4o"]},
        "slow": fake(2, step_ms=600),
        "broken": {"path": "owner/not-here"},
    }
    with LauncherProcess(toml(models, memory="8G"), "--port", str(port), http=True) as launched:
        site = Site(launched, port)
        site.wait_up()
        window.get(f"http://127.0.0.1:{port}/")
        until(
            window, "return document.querySelectorAll('#model-list li').length === 3", "the models are listed"
        )
        shown = states(window)
        assert shown["broken"].startswith("cannot be loaded")
        assert shown["quick"].startswith("not loaded · 1.0 GiB")
        assert shown["slow"].startswith("not loaded · 2.0 GiB")
        assert texts(window, "#model > span:not(.dot)") == ["quick"]
        assert texts(window, "#summary") == ["quick will be loaded for the first question."]
        fill(window, max_tokens=5)
        for name in ("quick", "slow"):
            choose(window, name)
            window.keys("#text", "Hello" + KEYS["Enter"])
            if name == "slow":
                until(
                    window,
                    "return /slow is loading: /.test(document.getElementById('summary').textContent)"
                    " && document.getElementById('load-progress').checkVisibility()",
                    "the page tells how far the load is",
                )
            until(window, ANSWERED, "the answer's end")
            assert texts(window, ".turn .error") == []
        until(window, "return document.getElementById('notice').hidden", "both are loaded")
        assert window.js("return document.querySelectorAll('.turn.assistant').length") == 2
        assert texts(window, ".turn .by") == ["quick", "slow"]
        push(window, "Unload slow")
        until(
            window,
            "return /slow will be loaded/.test(document.getElementById('summary').textContent)",
            "unloaded",
        )
        assert site.states()["slow"] == "unloaded"
        push(window, "Load it now")
        until(window, "return document.getElementById('notice').hidden", "it is loaded again")
        assert site.states()["slow"] == "loaded"
        assert window.complaints() == []
