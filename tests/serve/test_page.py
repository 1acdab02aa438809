"""The chat page on a launcher: every model is offered with its state, and one is loaded by the first question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.page.browsers import KEYS, Browser, opened, until
from tests.serve.launching import LauncherProcess, fake, toml
from tests.serve.test_http import Site
from tests.support.ports import free_port


@pytest.fixture
def window() -> Iterator[Browser]:
    with opened("chromium") as browser:
        yield browser


def labels(browser: Browser) -> list[str]:
    """The models as the picker shows them."""
    return list(
        browser.js("return [...document.getElementById('model').options].map((each) => each.textContent)")
    )


@pytest.mark.slow
def test_the_picker_shows_every_model_and_the_first_question_loads_one(window: Browser) -> None:
    port = free_port()
    models: dict[str, dict[str, Any]] = {
        "quick": {**fake(1), "aliases": ["gpt-4o"]},
        "slow": fake(2, step_ms=1500),
        "broken": {"path": "owner/not-here"},
    }
    with LauncherProcess(toml(models, memory="8G"), "--port", str(port), http=True) as launched:
        Site(launched, port).wait_up()
        window.get(f"http://127.0.0.1:{port}/")
        until(window, "return document.getElementById('model').options.length === 3", "the models are listed")
        assert labels(window) == [
            "broken (cannot be loaded)", "quick (not loaded, needs 1.0 GiB)", "slow (not loaded, needs 2.0 GiB)",
        ]  # fmt: skip
        assert window.js("return document.getElementById('model').value") == "quick"
        for name in ("quick", "slow"):
            window.js(
                "const e = document.getElementById('model'); e.value = arguments[0];"
                "e.dispatchEvent(new Event('change'))",
                name,
            )
            window.js("document.getElementById('max_tokens').value = 5")
            window.keys("#text", "Hello" + KEYS["Enter"])
            if name == "slow":
                until(
                    window,
                    "return /slow is loading/.test(document.getElementById('summary').textContent)",
                    "the page tells how far the load is",
                )
            until(
                window,
                f"return [...document.getElementById('model').options].some((each) => each.textContent === '{name}')",
                "the model is loaded",
            )
            until(window, "return !document.getElementById('send').disabled", "the answer's end")
        assert window.js("return document.querySelectorAll('.turn.assistant').length") == 2
        assert window.complaints() == []
