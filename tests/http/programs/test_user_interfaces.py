"""User interfaces that others wrote, in front of `zmqengine serve` with the bundled models.

Open WebUI in Chromium, with nothing set but the address: a person signs up, chooses a model and chats. It offers tools
of its own to every model, and asks for titles, tags and follow-up questions. Of LibreChat, whose server wants a
MongoDB, the library by which it calls models. Jan is an application for desktops: `tests/http/apis/test_interfaces.py`
has its requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.http.front import wait_until
from tests.http.page.browsers import KEYS, Browser, opened
from tests.http.programs.programs_of_others import DIRECTORY, results_of, wanted
from tests.serve.launching import LauncherProcess, toml
from tests.support.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]

WAIT_S = 600
"""It imports for a minute, and for five on a machine that is busy with other things."""
MODELS = ("pico", "pico-tools", "pico-eye", "pico-embed")
PICTURE = Path(__file__).parents[3] / "docs/pictures/shapes.png"
ACCOUNT = {"#name": "Ann", "#email": "ann@example.org", "#password": "a-long-password"}
IS_DONE = (
    "return document.querySelector('#voice-input-button') !== null"
    " && document.querySelector('.chat-assistant')?.innerText.trim() && true"
)


class Answer(NamedTuple):
    """An answer as it is shown: its text, and all that stands there, an error for example."""

    text: str
    shown: str


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of `zmqengine serve` with the bundled models."""
    port = free_port()
    models = {name: {"path": name} for name in MODELS}
    with LauncherProcess(toml(models), "--port", str(port), http=True):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/v1/models"), "the front-end listens", WAIT_S)
        yield url


def answers(url: str) -> bool:
    """Whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def open_webui(directory: Path, **environment: str) -> Iterator[str]:
    """The address of an Open WebUI without users, whose files are in a directory."""
    port = free_port()
    command = [f"{DIRECTORY}/open-webui/bin/open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "DATA_DIR": str(directory), "HOME": str(directory), **environment}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health"), "it starts", WAIT_S)
        assert process.poll() is None, (directory / "log").read_text()[-2000:]
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@wanted
@pytest.mark.parametrize("api", ["ollama", "openai"])
def test_a_person_chats_with_every_kind_of_model(served: str, api: str, tmp_path: Path) -> None:
    """Also with one whose chat template takes no tools: the answer was that it takes none."""
    addresses = {
        "ollama": {"OLLAMA_BASE_URL": served, "ENABLE_OPENAI_API": "false"},
        "openai": {
            "OPENAI_API_BASE_URL": f"{served}/v1",
            "OPENAI_API_KEY": "none",
            "ENABLE_OLLAMA_API": "false",
        },
    }
    with open_webui(tmp_path, **addresses[api]) as url, opened("chromium") as browser:
        sign_up(browser, url)
        refused = ask(browser, url, "pico-embed", "Tell me about a cat.")
        assert (refused.text, "it makes embeddings" in refused.shown) == ("", True)
        assert ask(browser, url, "pico", "Tell me about a cat.").text
        assert ask(browser, url, "pico-tools", "What is 417 + 2385?").text
        assert ask(browser, url, "pico-eye", "What do you see?", picture=PICTURE).text
        pictures = Path(os.environ.get("ZMQENGINE_TEST_PICTURES", tmp_path))
        (pictures / f"open-webui-{api}.png").write_bytes(browser.picture())


@wanted
def test_librechats_library_chats_and_calls_tools(served: str, tmp_path: Path) -> None:
    """By the OpenAI API, streamed, as its custom endpoints do."""
    results = results_of("librechat.mjs", served, environment="", scratch=tmp_path)
    assert [(result["name"], result["error"]) for result in results if result["error"]] == []
    assert len(results) == 3


def sign_up(browser: Browser, url: str) -> None:
    """Make the first account."""
    browser.get(f"{url}/auth")
    wait_until(lambda: press_button(browser, "Get started"), "the welcome", WAIT_S)
    wait_until(lambda: browser.js("return document.querySelector('#name') !== null"), "the form", WAIT_S)
    for field, text in ACCOUNT.items():
        browser.keys(field, text)
    assert press_button(browser, "Create Admin Account")
    wait_until(lambda: browser.js("return document.querySelector('#chat-input') !== null"), "a chat", WAIT_S)
    wait_until(lambda: press_button(browser, "Okay, Let's Go!"), "the news of the release", WAIT_S)


def press_button(browser: Browser, text: str) -> bool:
    """Press the button of this text, if it is there."""
    script = (
        "const button = [...document.querySelectorAll('button')].find((e) => e.innerText.trim() === arguments[0]);"
        "button?.click(); return button !== undefined"
    )
    return bool(browser.js(script, text))


def ask(browser: Browser, url: str, model: str, question: str, *, picture: Path | None = None) -> Answer:
    """The answer of a model, in a new chat."""
    browser.get(url)
    wait_until(lambda: browser.js("return document.querySelector('#chat-input') !== null"), "a chat", WAIT_S)
    wait_until(
        lambda: browser.js("return document.querySelector('#model-selector-model-button') !== null"),
        "the models", WAIT_S,
    )  # fmt: skip
    browser.click("#model-selector-model-button")
    option = f"[role=option][aria-label='Select {model} model']"
    wait_until(
        lambda: browser.js("return document.querySelector(arguments[0]) !== null", option), model, WAIT_S
    )
    browser.click(option)
    if picture is not None:
        browser.keys("input[type=file]:not(#camera-input)", str(picture))
        shown = "return document.querySelector('#message-input-container img') !== null"
        wait_until(lambda: browser.js(shown), "the picture in the composer", WAIT_S)
    browser.click("#chat-input")
    browser.keys("#chat-input", question)
    browser.keys("#chat-input", KEYS["Enter"])
    wait_until(lambda: browser.js(IS_DONE), f"the answer of {model}", WAIT_S)
    text = browser.js(
        "return document.querySelector('.chat-assistant .markdown-prose')?.innerText.trim() ?? ''"
    )
    shown = browser.js("return document.querySelector('.chat-assistant').innerText.trim()")
    print(f"{model}: {shown!r}")
    return Answer(text, shown)
