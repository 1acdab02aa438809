"""What tests of the pages do in a browser, and what its model says."""

from __future__ import annotations

import os
from pathlib import Path

from tests.http.page.browsers import KEYS, Browser, until
from tests.http.scripted import ScriptedClient

ANSWERED = "return document.getElementById('stop').hidden"
LAST = "[...document.querySelectorAll('.turn.assistant')].pop()"
ANSWER = "document.querySelector('.turn.assistant .answer')"
FACTS: dict[str, str | bool | int] = {
    "think_start": "<think>", "think_end": "</think>", "default_temperature": "0.6",
}  # fmt: skip
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if reasoning_effort is defined %}<{{ reasoning_effort }}>{% endif %}<assistant>"
)


class Script:
    """What the model of `scripted_front` says."""

    def __init__(self) -> None:
        self.text = "Hi."
        self.client = ScriptedClient(
            lambda prompt: self.text, template=TURNS, facts=FACTS, context_tokens=100_000
        )


def visit(browser: Browser, url: str) -> None:
    """Open a page and wait until it sees a worker."""
    browser.get(url)
    back(browser)


def back(browser: Browser) -> None:
    """Wait until the page has loaded its chats and sees a worker."""
    until(
        browser,
        "const d = document.body.dataset; return d.ready === '1' && (d.loaded || !document.getElementById('talk'))",
        "the page sees the worker",
    )


def fill(browser: Browser, **options: object) -> None:
    """Set options as a user would, events and all."""
    for name, value in options.items():
        browser.js(
            "const e = document.getElementById(arguments[0]);"
            "if (e.type === 'checkbox') e.checked = arguments[1]; else e.value = arguments[1];"
            "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))",
            name,
            value if isinstance(value, bool) else str(value),
        )


def say(browser: Browser, text: str, **options: object) -> None:
    """Fill in the options, type, press Enter."""
    fill(browser, **options)
    browser.keys("#text", text + KEYS["Enter"])


def answered(browser: Browser, count: int) -> None:
    """Wait for the end of the answer of this number."""
    until(
        browser, f"return document.querySelectorAll('.turn.assistant').length === {count}", f"answer {count}"
    )
    until(browser, ANSWERED, "the answer's end")


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of the elements."""
    found = browser.js(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )
    return [str(each) for each in found]


def push(browser: Browser, name: str) -> None:
    """Press the last button of this name, which is its label or its text."""
    browser.js(
        "const nameOf = (each) => each.getAttribute('aria-label') || each.textContent.trim();"
        "[...document.querySelectorAll('button')].filter((each) => nameOf(each) === arguments[0]).pop().click()",
        name,
    )


def picture(browser: Browser, name: str) -> None:
    """Keep what it looks like, if somebody wants to look."""
    if os.environ.get("ZMQENGINE_SCREENSHOTS"):
        (Path(os.environ["ZMQENGINE_SCREENSHOTS"]) / f"{name}.png").write_bytes(browser.picture())
