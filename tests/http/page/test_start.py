"""The page before the first question, its composer, its keyboard and its list of chats."""

from __future__ import annotations

import json

import pytest

from tests.http.front import serving
from tests.http.page.browsers import KEYS, Browser, until
from tests.http.page.steps import ANSWERED, Script, answered, back, fill, push, say, texts, visit
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

SHOWN = "return document.getElementById(arguments[0]).checkVisibility()"
KEY = (
    "document.activeElement.dispatchEvent(new KeyboardEvent('keydown',"
    " {key: arguments[0], ctrlKey: true, metaKey: true, shiftKey: arguments[1], bubbles: true, cancelable: true}))"
)


def test_a_chat_begins_with_a_greeting_the_model_and_suggestions(scripted: Browser, script: Script) -> None:
    """A suggestion is asked by a click; one that wants a text is written down for the user to go on."""
    assert scripted.js(SHOWN, "welcome")
    assert texts(scripted, "#greeting")[0]
    assert "scripted · ready · 100,000 tokens of context · thinks" in texts(scripted, "#model-facts")
    assert len(texts(scripted, "#suggestions button")) == 4
    scripted.js("document.querySelectorAll('#suggestions button')[3].click()")
    assert scripted.js("return document.getElementById('text').value").startswith("Summarise this text")
    assert texts(scripted, ".turn") == []
    scripted.js("document.querySelector('#suggestions button').click()")
    answered(scripted, 1)
    assert script.client.prompts[-1].startswith("<user>Explain how a language model writes")
    assert not scripted.js(SHOWN, "welcome")
    push(scripted, "New chat")
    assert scripted.js(SHOWN, "welcome")


def test_send_and_stop_share_one_place(browser: Browser) -> None:
    """Send waits for a text, Stop is there while an answer comes, and a stopped question can be asked again."""
    assert scripted_buttons(browser) == ["send", True]
    browser.keys("#text", "Hello")
    assert scripted_buttons(browser) == ["send", False]
    fill(browser, max_tokens=3000)
    browser.keys("#text", KEYS["Enter"])
    assert scripted_buttons(browser)[0] == "stop"
    assert browser.js("return document.getElementById('talk').getAttribute('aria-busy')") == "true"
    browser.click("#stop")
    until(browser, ANSWERED, "it stopped")
    assert scripted_buttons(browser) == ["send", True]


def scripted_buttons(browser: Browser) -> list[object]:
    """The id of the one round button in sight, and whether it is disabled."""
    return list(
        browser.js(
            "const [one, ...more] = [...document.querySelectorAll('.round')].filter((e) => e.checkVisibility());"
            "return [more.length ? 'both' : one.id, one.disabled]"
        )
    )


def test_the_context_is_measured(scripted: Browser) -> None:
    """By the tokens of the last answer and its prompt."""
    assert not scripted.js(SHOWN, "context")
    say(scripted, "Hello")
    answered(scripted, 1)
    label = scripted.js("return document.getElementById('context').getAttribute('aria-label')")
    assert label == "26 of 100,000 tokens of context used"


def test_a_new_chat_takes_no_file_of_the_last_one(scripted: Browser, script: Script) -> None:
    """What was attached and not sent is gone with its chat."""
    scripted.js(
        "const d = new DataTransfer(); d.items.add(new File(['secret'], 'notes.txt'));"
        "const input = document.getElementById('file'); input.files = d.files;"
        "input.dispatchEvent(new Event('change'))"
    )
    until(scripted, "return document.querySelectorAll('#attached .chip').length === 1", "the file")
    push(scripted, "New chat")
    assert texts(scripted, "#attached .chip") == []
    say(scripted, "Hello")
    answered(scripted, 1)
    assert script.client.prompts[-1] == "<user>Hello<assistant>"


def test_what_was_written_stays_with_its_chat(scripted: Browser) -> None:
    """Also when another chat is looked at before it is sent."""
    say(scripted, "First")
    answered(scripted, 1)
    scripted.keys("#text", "half a question")
    push(scripted, "New chat")
    assert scripted.js("return document.getElementById('text').value") == ""
    scripted.keys("#text", "another")
    push(scripted, "New chat")
    assert scripted.js("return document.getElementById('text').value") == "another"
    push(scripted, "First")
    assert scripted.js("return document.getElementById('text').value") == "half a question"


def test_an_answer_goes_on_while_another_chat_is_open(window: Browser) -> None:
    """Each has its own Send and Stop; a chat that is deleted in mid-answer does not come back."""
    config = FakeEngineConfig(vocab_size=257, step_ms=50)
    with FakeWorker(config) as worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        visit(window, front.url + "/")
        say(window, "Long", max_tokens=3000)
        until(window, "return document.querySelectorAll('.turn.assistant').length === 1", "it begins")
        push(window, "New chat")
        assert scripted_buttons(window) == ["send", True]
        assert texts(window, "#list .running") == ["Long"]
        say(window, "Short", max_tokens=5)
        until(window, "return document.querySelectorAll('.turn.assistant').length === 1", "another begins")
        until(window, ANSWERED, "it ends")
        push(window, "Long, an answer comes")
        assert scripted_buttons(window)[0] == "stop"
        length = window.js("return document.querySelector('.answer').textContent.length")
        until(window, f"return document.querySelector('.answer').textContent.length > {length}", "it grows")
        push(window, "Short")
        push(window, "Delete Long")
        idle = (
            "return (async () => (await (await fetch('/status')).json()).workers[0].requests.length === 0)()"
        )
        until(window, idle, "the worker stopped")
        until(window, "return document.querySelectorAll('#list .running').length === 0", "no answer comes")
        assert texts(window, "#list .open span") == ["Short"]
        window.get("about:blank")


def test_chats_are_searched_renamed_and_deleted(scripted: Browser, script: Script) -> None:
    """By the words of their messages; a deleted one comes back by Undo."""
    for question, answer in (("First", "A whale is a mammal."), ("Second", "A shark is a fish.")):
        script.text = answer
        push(scripted, "New chat")
        say(scripted, question)
        answered(scripted, 1)
    fill(scripted, search="WHALE")
    assert texts(scripted, "#list .open span") == ["First"]
    assert texts(scripted, "#list mark") == ["whale"]
    fill(scripted, search="unicorn")
    assert texts(scripted, "#list .open") == []
    assert texts(scripted, "#list .note") == ["No chat has these words."]
    fill(scripted, search="")
    push(scripted, "Rename First")
    scripted.keys("#list input", "Mammals" + KEYS["Enter"])
    until(scripted, "return document.querySelector('#list input') === null", "the name is kept")
    assert texts(scripted, "#list .open span") == ["Second", "Mammals"]
    push(scripted, "Rename Mammals")
    scripted.keys("#list input", "Other" + KEYS["Escape"])
    push(scripted, "Delete Second")
    until(scripted, "return document.querySelectorAll('#list .open').length === 1", "it is gone")
    scripted.refresh()
    back(scripted)
    assert texts(scripted, "#list .open span") == ["Mammals"]
    push(scripted, "Delete Mammals")
    until(scripted, "return document.querySelectorAll('#list .open').length === 0", "all are gone")
    push(scripted, "Undo")
    until(scripted, "return document.querySelectorAll('#list .open').length === 1", "it is back")
    assert texts(scripted, ".turn.user .body") == ["First"]


def test_exported_chats_are_imported_once(scripted: Browser) -> None:
    """Beside those that are here; a file of something else says so."""
    give = (
        "const d = new DataTransfer(); d.items.add(new File([arguments[0]], 'chats.json'));"
        "const input = document.getElementById('import-file'); input.files = d.files;"
        "input.dispatchEvent(new Event('change'))"
    )
    chat = {
        "id": "1",
        "title": "Old",
        "updated": 1,
        "system": "",
        "messages": [{"role": "user", "content": "Hi"}],
    }
    for count in ("1 chat imported.", "0 chats imported."):
        scripted.js(give, json.dumps([chat]))
        until(scripted, f"return document.getElementById('toast').textContent === '{count}'", count)
    assert texts(scripted, "#list .open span") == ["Old"]
    scripted.js(give, '{"id": 1}')
    until(
        scripted,
        "return /no exported chats/.test(document.getElementById('toast').textContent)",
        "the refusal",
    )


def test_shortcuts_do_what_their_list_says(scripted: Browser) -> None:
    """Each with the key of the system."""
    say(scripted, "Hello")
    answered(scripted, 1)
    scripted.js(KEY, "k", False)
    assert scripted.js("return document.activeElement.id") == "search"
    scripted.js(KEY, "o", True)
    assert texts(scripted, ".turn") == []
    assert scripted.js("return document.activeElement.id") == "text"
    scripted.js(KEY, ".", False)
    assert scripted.js(SHOWN, "options")
    scripted.js(KEY, ".", False)
    assert not scripted.js(SHOWN, "options")
    scripted.js(KEY, "b", False)
    assert not scripted.js(SHOWN, "chats")
    scripted.js(KEY, "b", False)
    assert scripted.js(SHOWN, "chats")
    scripted.js(KEY, "/", False)
    assert scripted.js("return document.getElementById('shortcuts').open")
    assert len(texts(scripted, "#shortcut-list dt")) > 8
    scripted.js("document.getElementById('shortcuts').close()")
    push(scripted, "Hello")
    scripted.keys("#text", "\ue013")
    assert scripted.js("return document.activeElement.getAttribute('aria-label')") == "Edit this message"


def test_on_a_phone_the_chats_lie_above_the_conversation(scripted: Browser) -> None:
    """They are opened by a button, and closed by a choice or a tap beside them."""
    scripted.size(390, 844)
    scripted.refresh()
    back(scripted)
    assert not scripted.js(SHOWN, "chats")
    scripted.click("#menu")
    assert scripted.js(SHOWN, "chats")
    scripted.js("document.getElementById('scrim').click()")
    assert not scripted.js(SHOWN, "chats")
    scripted.click("#menu")
    scripted.click("#new")
    assert not scripted.js(SHOWN, "chats")
