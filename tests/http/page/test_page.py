"""The pages at / and /workers, in real browsers: they show, chat, keep what was said, and keep to their policy.

`ZMQENGINE_SCREENSHOTS` names a directory for pictures of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import zmqengine_http.page
from tests.http.front import Front, get, post, serving
from tests.http.page.browsers import KEYS, Browser, press, until
from tests.http.page.steps import (
    ANSWER,
    ANSWERED,
    LAST,
    Script,
    answered,
    back,
    fill,
    picture,
    push,
    say,
    texts,
    visit,
)
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.page import LIBRARIES, SCRIPTS, page

pytestmark = pytest.mark.process

PAGE = Path(zmqengine_http.page.__file__).parent
STYLED = ("chat/chat.html", "workers/workers.html", "style.css", "chat/chat.css", "workers/workers.css")
MARKDOWN = """# A title

Some **bold** text, `code`, and a [link](https://example.org/x), [a bad one](javascript:alert(1)).

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>")
```

<img src=x onerror="window.hit = 1"> <script>window.hit = 1</script> ![a picture](https://example.org/p.png)
"""


# --- without a browser -------------------------------------------------------------------------------------


def test_a_program_gets_json_and_a_browser_the_page(front: Front) -> None:
    """By what they accept."""
    assert get(front, "/").json["name"] == "zmqengine"
    for path, name in (("/", "chat"), ("/workers", "workers")):
        reply = get(front, path, accept="text/html,*/*")
        assert reply.body == page(name).body
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_a_library_is_served_as_it_is(front: Front) -> None:
    """To be kept for ever, as its name has its version; there is no other file."""
    for name in LIBRARIES:
        reply = get(front, f"/page/{name}")
        assert reply.body == (PAGE / "vendor" / name).read_bytes()
        assert "immutable" in reply.headers["cache-control"]
    for name in ("LICENSES.txt", "..%2Fserver.js", ""):
        assert get(front, f"/page/{name}").status == 404


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    """One document; what models say is only ever text. The library parses, and makes no markup."""
    own = {name for scripts in SCRIPTS.values() for name in scripts if not name.startswith("vendor/")}
    for name in (*own, *STYLED):
        text = (PAGE / name).read_text()
        assert not re.search(r"(src|href)=\"(?!data:|workers|\./|#icon-|\")", text), name
        assert "http://" not in text
        assert "https://" not in text
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", ".render("):
            # Temml makes nodes of its own.
            assert word not in text.replace("temml.render(", ""), name
    for name in (*LIBRARIES, "markdown-it.min.js"):
        assert "</script" not in (PAGE / "vendor" / name).read_text()
    licences = (PAGE / "vendor/LICENSES.txt").read_text()
    for path in (*(PAGE / "vendor").glob("*.js"), *(PAGE / "vendor").glob("*.svg")):
        assert path.stem.split("-")[0] in licences.lower(), path


# --- the chat ----------------------------------------------------------------------------------------------


def test_it_chats_and_tells_what_it_cost(scripted: Browser, script: Script) -> None:
    """The second message carries the first; empty options are the model's own."""
    say(scripted, "Hello")
    answered(scripted, 1)
    figures = scripted.js(f"return {LAST}.querySelector('.figures').textContent")
    assert re.search(r"4 tokens · first after [\d.]+ s · prompt \d+ \(3 cached\)", figures)
    assert script.client.options[-1]["temperature"] == 0.6
    assert scripted.js("return document.getElementById('temperature').placeholder") == "0.6"
    say(scripted, "And then?", temperature=0.25, max_tokens=100)
    answered(scripted, 2)
    assert script.client.prompts[-1] == "<user>Hello<assistant>Hi.<user>And then?<assistant>"
    assert script.client.options[-1]["temperature"] == 0.25
    assert texts(scripted, ".turn .answer") == ["Hi.", "Hi."]
    assert scripted.js("return document.getElementById('news').textContent") == "The answer is complete."


def test_markdown_becomes_elements_and_no_markup(scripted: Browser, script: Script) -> None:
    """Code has a button that copies it; HTML is text, and nothing is fetched."""
    script.text = MARKDOWN
    say(scripted, "<b>bold?</b>")
    answered(scripted, 1)
    answer = f"{LAST}.querySelector('.answer')"
    found = scripted.js(
        f"const a = {answer}; const n = (s) => a.querySelectorAll(s).length;"
        "return [n('h1'), n('strong'), n('ol > li'), n('td'), n('.block pre code'), n('img'), n('script'), n('b')]"
    )
    assert found == [1, 1, 2, 2, 1, 0, 0, 0]
    assert scripted.js(f"return [...{answer}.querySelectorAll('a')].map((each) => each.href)") == [
        "https://example.org/x"
    ]
    assert '<img src=x onerror="window.hit = 1">' in scripted.js(f"return {answer}.textContent")
    assert scripted.js("return window.hit === undefined")
    assert texts(scripted, ".block .bar span") == ["python"]
    assert texts(scripted, ".turn.user .body") == ["<b>bold?</b>"]
    scripted.click(".block .bar button")
    until(
        scripted,
        "return /Copied|Not copied/.test(document.getElementById('news').textContent)",
        "a copy",
    )
    assert texts(scripted, ".block pre code") == ['print("<b>")\n']
    picture(scripted, "markdown")


def test_thinking_is_folded(scripted: Browser, script: Script) -> None:
    """And apart from the answer."""
    script.text = "<think>Let me see.</think>It is so."
    say(scripted, "Hello")
    answered(scripted, 1)
    assert texts(scripted, ".thinking summary") == ["Thought, 3 words"]
    assert not scripted.js("return document.querySelector('.thinking').open")
    assert texts(scripted, ".answer") == ["It is so."]
    assert texts(scripted, ".thinking > div") == ["Let me see."]


def test_a_cut_answer_says_so_and_goes_on_where_it_was_cut(scripted: Browser, script: Script) -> None:
    """The request ends with what there is, and the rest is appended."""
    script.text = "one two three"
    say(scripted, "Count", max_tokens=7)
    answered(scripted, 1)
    assert texts(scripted, ".answer") == ["one two"]
    assert "Cut: the longest answer was reached." in texts(scripted, ".cut")
    script.text = " three"
    fill(scripted, max_tokens="")
    push(scripted, "Continue this answer")
    until(scripted, "return document.querySelector('.answer').textContent === 'one two three'", "the rest")
    until(scripted, ANSWERED, "its end")
    assert script.client.prompts[-1] == "<user>Count<assistant>one two"
    assert texts(scripted, ".cut") == []


def test_an_answer_is_made_again_and_the_earlier_one_kept(scripted: Browser, script: Script) -> None:
    """One turns from one to the other."""
    script.text = "first"
    say(scripted, "Hello")
    answered(scripted, 1)
    script.text = "second"
    push(scripted, "Regenerate")
    until(scripted, "return document.querySelector('.answer').textContent === 'second'", "the second")
    until(scripted, ANSWERED, "its end")
    push(scripted, "Earlier answer")
    assert texts(scripted, ".answer") == ["first"]
    push(scripted, "Later answer")
    assert texts(scripted, ".answer") == ["second"]
    assert script.client.prompts[-1] == "<user>Hello<assistant>"


def test_an_edited_message_is_asked_again_and_what_followed_is_kept(
    scripted: Browser, script: Script
) -> None:
    """In a copy of the chat."""
    say(scripted, "Hello")
    answered(scripted, 1)
    say(scripted, "More")
    answered(scripted, 2)
    scripted.js("document.querySelector('[aria-label=\"Edit this message\"]').click()")
    scripted.js("document.querySelector('.editing textarea').value = 'Goodbye'")
    script.text = "Bye."
    scripted.js("document.querySelector('.turn .buttons .primary').click()")
    until(scripted, "return document.querySelector('.answer').textContent === 'Bye.'", "another answer")
    until(scripted, ANSWERED, "its end")
    assert texts(scripted, ".turn.user .body") == ["Goodbye"]
    assert texts(scripted, "#list li button:first-child") == ["Hello", "Hello (earlier)"]
    push(scripted, "Hello (earlier)")
    assert texts(scripted, ".turn.user .body") == ["Hello", "More"]


def test_chats_settings_and_system_prompts_outlive_a_reload(scripted: Browser, script: Script) -> None:
    """In this browser; each chat has its own system prompt, and saved ones can be chosen again."""
    say(scripted, "Hello", system="Be brief.", temperature=0.5)
    answered(scripted, 1)
    assert script.client.prompts[-1].startswith("<system>Be brief.<user>Hello")
    push(scripted, "Save this prompt")
    push(scripted, "New chat")
    assert scripted.js("return document.getElementById('system').value") == ""
    fill(scripted, presets="Be brief.")
    assert scripted.js("return document.getElementById('system').value") == "Be brief."
    say(scripted, "Second")
    answered(scripted, 1)
    scripted.refresh()
    back(scripted)
    assert texts(scripted, "#list li button:first-child") == ["Second", "Hello"]
    assert texts(scripted, ".turn.user .body") == ["Second"]
    assert scripted.js("return document.getElementById('temperature').value") == "0.5"
    push(scripted, "Hello")
    assert texts(scripted, ".turn.user .body") == ["Hello"]
    assert texts(scripted, ".turn.assistant .answer") == ["Hi."]
    scripted.js(
        "HTMLAnchorElement.prototype.click = function () {};"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => {"
        "document.body.dataset[blob.type === 'text/markdown' ? 'text' : 'all'] = text; }); return 'data:,'; }"
    )
    push(scripted, "Export this chat as text")
    push(scripted, "Export all chats")
    until(scripted, "return document.body.dataset.text && document.body.dataset.all", "both files")
    assert len(json.loads(scripted.js("return document.body.dataset.all"))) == 2
    exported = scripted.js("return document.body.dataset.text")
    assert exported == "# Hello\n\n**System**\n\nBe brief.\n\n**You**\n\nHello\n\n**Model**\n\nHi.\n"


def test_a_text_file_is_attached_and_others_are_refused(scripted: Browser, script: Script) -> None:
    """With its name, in a fence that its own text cannot end."""
    scripted.js(
        "const d = new DataTransfer(); d.items.add(new File(['a ```` b'], 'notes.txt'));"
        "d.items.add(new File([new Uint8Array([0, 1, 2])], 'x.bin'));"
        "const input = document.getElementById('file'); input.files = d.files;"
        "input.dispatchEvent(new Event('change'))"
    )
    until(
        scripted,
        "return /x.bin is neither text/.test(document.getElementById('attached').textContent)",
        "a refusal",
    )
    say(scripted, "Read it")
    answered(scripted, 1)
    assert "<user>notes.txt:\n`````\na ```` b\n`````\n\nRead it<assistant>" in script.client.prompts[-1]
    assert texts(scripted, ".turn.user .file summary") == ["notes.txt"]


def test_a_dropped_and_a_pasted_picture_are_shown_and_seen(window: Browser) -> None:
    """As thumbnails before they are sent, in the conversation after that, and a large one no larger than it may be."""
    script = """
        const done = arguments[0];
        const canvas = document.createElement('canvas'); canvas.width = canvas.height = arguments[1];
        const pen = canvas.getContext('2d'); const data = pen.createImageData(canvas.width, canvas.height);
        for (let i = 0; i < data.data.length; i += 65536) crypto.getRandomValues(data.data.subarray(i, i + 65536));
        for (let i = 3; i < data.data.length; i += 4) data.data[i] = 255;
        pen.putImageData(data, 0, 0);
        canvas.toBlob((blob) => {
          const d = new DataTransfer(); d.items.add(new File([blob], done + '.png', { type: 'image/png' }));
          // Browsers differ in what their constructors of events keep.
          const dropped = done === 'dropped';
          const event = new Event(dropped ? 'drop' : 'paste', { bubbles: true, cancelable: true });
          Object.defineProperty(event, dropped ? 'dataTransfer' : 'clipboardData', { value: d });
          document.getElementById('text').dispatchEvent(event);
        }, 'image/png');
    """
    with FakeWorker(FakeEngineConfig(vision=True, eos_index=5)) as worker:
        config = HttpConfig(workers=(worker.address,), probe_ms=200)
        with serving(config) as front:
            window.get(front.url + "/")
            window.js("localStorage.clear(); sessionStorage.clear()")
            visit(window, front.url + "/")
            window.js(script, "dropped", 20)
            window.js(script, "pasted", 2500)
            until(window, "return document.querySelectorAll('#attached img').length === 2", "two thumbnails")
            say(window, "What is it?")
            answered(window, 1)
            assert texts(window, ".turn .error") == []
            shown = window.js(
                "return [...document.querySelectorAll('.turn.user img')].map((each) => [each.alt, each.naturalWidth])"
            )
            assert sorted(shown) == [["dropped.png", 20], ["pasted.png", 2048]]
            picture(window, "page-image")
            window.get("about:blank")


def test_a_failure_keeps_the_question(scripted: Browser, script: Script) -> None:
    """With the reason, and a button to ask again."""
    say(scripted, "Hello", temperature=9)
    until(scripted, "return document.querySelectorAll('.turn .error').length === 1", "the refusal")
    assert "temperature" in texts(scripted, ".turn .error")[0]
    assert texts(scripted, ".turn.user .body") == ["Hello"]
    fill(scripted, temperature="")
    push(scripted, "Try again")
    answered(scripted, 1)
    assert texts(scripted, ".turn .error") == []


def test_a_chat_of_five_hundred_messages_is_shown_and_goes_on(scripted: Browser, script: Script) -> None:
    """All of it is there after a load, and the next answer redraws its own turns alone."""
    say(scripted, "Hello")
    answered(scripted, 1)
    scripted.js(
        "const asked = indexedDB.open('zmqengine'); asked.onsuccess = () => {"
        "  const chats = asked.result.transaction('chats', 'readwrite').objectStore('chats');"
        "  const all = chats.getAll(); all.onsuccess = () => { const [chat] = all.result;"
        "  chat.messages = Array.from({length: 500}, (_, n) => n % 2"
        "   ? {role: 'assistant', content: `answer ${n}`, finish: 'stop'} : {role: 'user', content: `q ${n}`});"
        "  chats.put(chat).onsuccess = () => { asked.result.close(); document.body.dataset.kept = 1; }; }; }"
    )
    until(scripted, "return document.body.dataset.kept", "the chat is kept")
    scripted.refresh()
    back(scripted)
    assert len(texts(scripted, ".turn")) == 500
    scripted.js("window.old = document.querySelectorAll('.turn')[490]")
    say(scripted, "x")
    answered(scripted, 251)
    assert scripted.js("return document.querySelectorAll('.turn')[490] === window.old")
    assert scripted.js(
        "const t = document.getElementById('talk'); return t.scrollHeight - t.scrollTop - t.clientHeight < 80"
    )
    assert script.client.prompts[-1].endswith("<assistant>answer 499<user>x<assistant>")


def test_a_reload_in_mid_answer_loses_a_second_at_most(browser: Browser) -> None:
    """What came stays, says that it was cut off, and can be continued."""
    say(browser, "Hello", max_tokens=3000)
    until(
        browser,
        "return (document.querySelector('.turn.assistant .answer') || {textContent: ''}).textContent.length > 150",
        "a good part",
    )
    length = browser.js(f"return {ANSWER}.textContent.length")
    browser.refresh()
    back(browser)
    # A hundred tokens a second.
    assert browser.js(f"return {ANSWER}.textContent.length") >= length - 120
    assert "Cut off" in texts(browser, ".cut")[0]
    fill(browser, max_tokens=20)
    before = browser.js(f"return {ANSWER}.textContent.length")
    push(browser, "Continue this answer")
    until(browser, f"return {ANSWER}.textContent.length > {before}", "it goes on")
    until(browser, ANSWERED, "its end")


def test_probabilities_are_behind_a_switch(browser: Browser) -> None:
    """Hovering, or the arrow keys, name them; without the switch there are none."""
    say(browser, "Hello", max_tokens=12, seed=1)
    answered(browser, 1)
    assert texts(browser, ".token") == []
    assert re.search(r"12 tokens · .*first after", texts(browser, ".figures")[0])
    say(browser, "Again", logprobs=True)
    answered(browser, 2)
    assert len(texts(browser, ".token")) > 3
    browser.keys("#talk", KEYS["ArrowRight"])
    until(browser, "return !document.getElementById('tip').hidden", "probabilities")
    tip = browser.js("return document.getElementById('tip').textContent")
    # Alternatives that are parts of characters read alike and are shown as one: the fake model makes such tokens too.
    assert len(tip.splitlines()) >= (1 if "\ufffd" in tip else 5)
    assert all(re.search(r"\d %  \"", line) for line in tip.splitlines())


def test_tokens_that_come_together_are_shown_one_by_one(window: Browser) -> None:
    """Parts of characters among them or not: what hovers is all of the text, and nothing else."""
    with (
        FakeWorker(FakeEngineConfig(vocab_size=257, instant=True)) as worker,
        serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front,
    ):
        visit(window, front.url + "/")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "seed": 1}
        text = post(front, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        # The model's tokens are random bytes: most that are no letter of ASCII are parts of nothing.
        letters = sum(character.isascii() for character in text)
        assert 10 < letters < 30
        say(window, "Hello", max_tokens=40, seed=1, logprobs=True)
        answered(window, 1)
        tokens = texts(window, ".turn.assistant .token")
        assert "".join(tokens) == text
        assert [token for token in tokens if token.isascii()] == [token for token in text if token.isascii()]
        assert max(map(len, tokens)) > 1
        # It would ask on when nobody answers any more.
        window.get("about:blank")


def test_escape_stops_an_answer_and_the_worker_stops_too(browser: Browser, front: Front) -> None:
    """The request is on the page of the workers while it runs, and gone afterwards."""
    running = "return (async () => (await (await fetch('/status')).json()).workers[0].requests.length)()"
    say(browser, "Hello", max_tokens=3000)
    until(browser, f"{running}", "the request is listed")
    press(browser, "Escape")
    until(browser, ANSWERED, "it stopped")
    until(
        browser,
        "return [...document.querySelectorAll('.cut')].some((note) => note.textContent === 'Stopped by you.')",
        "the answer says so",
    )
    until(browser, running.replace(".length)", ".length === 0)"), "the worker stopped")


def test_an_answer_outlives_the_death_of_its_worker(browser: Browser, worker: FakeWorker) -> None:
    """It is silent for a while, then says every token."""
    say(browser, "Hello", max_tokens=150)
    until(
        browser,
        "return (document.querySelector('.turn.assistant .answer') || {textContent: ''}).textContent.length > 10",
        "the answer began",
    )
    worker.kill()
    until(browser, "return document.body.dataset.ready === '0'", "the page sees the death")
    worker.start()
    until(browser, "return document.body.dataset.ready === '1'", "the page sees it return")
    answered(browser, 1)
    assert texts(browser, ".figures")[0].startswith("150 tokens ")
    assert texts(browser, ".turn .error") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("width", "height"), [(390, 844), (800, 900), (1280, 800)], ids=["narrow", "middle", "wide"]
)
def test_it_fits_in_both_schemes(
    scripted: Browser, script: Script, front: Front, scheme: str, width: int, height: int
) -> None:
    """No page to scroll sideways, and what scrolls in it takes the focus; text that stands out; no zoom on focus."""
    script.text = MARKDOWN
    scripted.scheme(scheme)
    scripted.size(width, height)
    try:
        say(scripted, "Hello")
        answered(scripted, 1)
        for path in ("", "workers"):
            if path:
                visit(scripted, f"{front.url}/{path}")
                until(scripted, "return document.querySelectorAll('.worker').length === 1", "the workers")
            wide = scripted.js("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1]
            unreached = (
                "return [...document.querySelectorAll('main *')].filter((each) => each.tabIndex < 0 && "
                "/auto|scroll/.test(getComputedStyle(each).overflowX) && !each.querySelector('button'))"
                ".map((each) => each.outerHTML.slice(0, 80))"
            )
            assert scripted.js(unreached) == []
            ground = "getComputedStyle(document.body).backgroundColor"
            colours = scripted.js(
                f"return ['body', '.answer', '.cut, .figures, .worker p', 'a'].map((s) => document.querySelector(s))"
                f".filter(Boolean).map((each) => [getComputedStyle(each).color, {ground}])"
            )
            assert len(colours) >= 2
            assert all(contrast(*pair) >= 4.5 for pair in colours)
            if not path and width > 760:
                # About 75 characters, as books have them.
                letters = scripted.js(
                    "const probe = document.createElement('span'); probe.style.whiteSpace = 'nowrap';"
                    "probe.textContent = 'the quick brown fox '.repeat(5);"
                    "const box = document.querySelector('.answer'); box.append(probe);"
                    "const width = probe.getBoundingClientRect().width / 100; probe.remove();"
                    "return box.getBoundingClientRect().width / width"
                )
                assert letters < 85
            picture(scripted, f"{path or 'chat'}-{scheme}-{width}")
            if not path:
                assert (
                    scripted.js(
                        "return parseFloat(getComputedStyle(document.getElementById('text')).fontSize)"
                    )
                    >= 16
                )
    finally:
        scripted.scheme("light")
        scripted.size(1200, 900)


def test_it_works_by_keyboard_alone(scripted: Browser, script: Script) -> None:
    """From the message to its buttons and back; a chat is chosen and an answer made again without a mouse."""
    assert scripted.js("return document.activeElement.id") == "text"
    scripted.keys("#text", "Hello" + KEYS["Enter"])
    answered(scripted, 1)
    script.text = "Again."
    seen: list[str] = []
    for _ in range(40):
        press(scripted, "Shift+Tab")
        name = scripted.js(
            "const a = document.activeElement; return a.id || a.getAttribute('aria-label') || a.textContent.trim()"
        )
        seen.append(name)
        if name == "Regenerate":
            press(scripted, "Enter")
            break
    assert seen[-1] == "Regenerate", seen
    until(scripted, "return document.querySelector('.answer').textContent === 'Again.'", "another answer")
    until(scripted, ANSWERED, "its end")
    scripted.js("document.getElementById('new').focus()")
    press(scripted, "Enter")
    assert texts(scripted, ".turn") == []
    assert scripted.js("return document.activeElement.id") == "text"


def test_every_control_has_a_name(scripted: Browser, front: Front) -> None:
    """For a screen reader: a label, its own text or an aria-label; the conversation is a log."""
    say(scripted, "Hello")
    answered(scripted, 1)
    unnamed = """
        const named = (e) => e.getAttribute('aria-label') || (e.labels && e.labels[0] && e.labels[0].textContent.trim())
          || (e.matches('button, details') && e.textContent.trim()) || e.matches('[role=status], [role=tooltip]');
        const all = document.querySelectorAll('button, input, select, textarea, [role], nav, dialog, details');
        return [...all].filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 80));
    """
    assert scripted.js(unnamed) == []
    assert scripted.js("return document.getElementById('talk').getAttribute('role')") == "log"
    visit(scripted, front.url + "/workers")
    assert scripted.js(unnamed) == []


def test_a_key_is_asked_for_once(window: Browser, worker: FakeWorker) -> None:
    """A wrong one is told; the right one is kept for the tab."""
    with serving(HttpConfig(workers=(worker.address,), probe_ms=200, api_keys=("secret-key",))) as front:
        window.get(front.url + "/")
        until(window, "return document.getElementById('ask').open", "it asks")
        window.keys("#key", "wrong-key" + KEYS["Enter"])
        until(
            window,
            "return /does not know/.test(document.getElementById('ask-why').textContent)",
            "it says why",
        )
        window.js("document.getElementById('key').value = ''")
        window.keys("#key", "secret-key" + KEYS["Enter"])
        until(window, "return document.body.dataset.ready === '1'", "it goes on")
        say(window, "Hello", max_tokens=5)
        answered(window, 1)
        window.refresh()
        until(window, "return document.body.dataset.ready === '1'", "the key was kept")
        window.get("about:blank")


def test_workers_and_requests_have_a_page(browser: Browser, front: Front, worker: FakeWorker) -> None:
    """With what they do, and the silence of one that is gone."""
    visit(browser, front.url + "/workers")
    assert "1 of 1 worker ready" in texts(browser, "#summary")[0]
    assert "Prompt cache" in texts(browser, ".worker")[0]
    browser.js(
        "fetch('/v1/chat/completions', {method: 'POST', headers: {'content-type': 'application/json'},"
        "body: JSON.stringify({messages: [{role: 'user', content: 'Hi'}], max_tokens: 400})})"
    )
    until(browser, "return document.querySelectorAll('#requests tr').length === 1", "the request is listed")
    worker.kill()
    until(
        browser, "return document.querySelectorAll('.worker .silent').length === 1", "the page sees the death"
    )
    worker.start()
    until(browser, "return document.body.dataset.ready === '1'", "the page sees it return")


def contrast(*colours: str) -> float:
    """Of two CSS colours, as WCAG 2 has it."""
    lights = []
    for colour in colours:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear: list[float] = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    """Black on white is 21."""
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
