"""How an answer is shown: code, formulas, speed, and what went wrong."""

from __future__ import annotations

import re

import pytest

from tests.http.front import Front, serving
from tests.http.page.browsers import Browser, until
from tests.http.page.steps import ANSWERED, LAST, Script, answered, fill, push, say, texts, visit
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

VISIBLE = (
    "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
    "return r.height > 0 && r.top >= 0 && r.bottom <= innerHeight && r.right <= innerWidth"
)
FETCHED = "return performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)"


def test_code_is_coloured_by_a_library_that_is_fetched_for_it(scripted: Browser, script: Script) -> None:
    """Text without code fetches none; the text of the code stays as it was; an unknown language is plain."""
    say(scripted, "Hello")
    answered(scripted, 1)
    assert not [path for path in scripted.js(FETCHED) if path.startswith("/page/")]
    code = 'def f(x):\n    return "<b>"\n'
    script.text = f"```python\n{code}```\n\n```klingon\nreturn 1\n```"
    say(scripted, "Code")
    answered(scripted, 2)
    until(scripted, "return document.querySelector('.block .hljs-keyword') !== null", "colours")
    assert texts(scripted, ".block pre code") == [code, "return 1\n"]
    assert texts(scripted, ".block .hljs-keyword") == ["def", "return"]
    assert [path for path in scripted.js(FETCHED) if path.startswith("/page/")] == [
        "/page/highlight-11.12.0.min.js"
    ]


def test_formulas_are_drawn_and_prices_are_not(scripted: Browser, script: Script) -> None:
    """Between dollars or backslashes, in a line or on lines of their own, which may begin like a list."""
    script.text = (
        "It is $a^2$ and \\(b_1\\), for $5 to $10 a month.\n\n"
        "\\[\nx\n- y\n= z\n\\]\n\n$$\\frac{1}{2}$$\n\n`$c$` and \\$d\\$ stay, so does $\\nonsense{$."
    )
    say(scripted, "Maths")
    answered(scripted, 1)
    until(scripted, "return document.querySelectorAll('math').length === 4", "four formulas")
    assert len(texts(scripted, ".formula.display math")) == 2
    assert texts(scripted, "mfrac > *") == ["1", "2"]
    text = scripted.js(f"return {LAST}.querySelector('.answer').textContent")
    assert "for $5 to $10 a month." in text
    assert "$c$ and $d$ stay" in text
    assert "\\nonsense{" in text
    assert texts(scripted, ".answer li, .answer h1, .answer h2") == []


def test_a_formula_links_to_nothing_and_fetches_nothing(scripted: Browser, script: Script) -> None:
    """What TeX has for links, pictures and styles makes none of them, and no formula takes for ever."""
    script.text = (
        "$\\href{javascript:window.hit=1}{x}$ $\\url{javascript:window.hit=1}$ $\\includegraphics{https://example.org/p.png}$"
        " $\\style{position:fixed}{y}$ $\\def\\a{\\a\\a}\\a$ $ok$"
    )
    say(scripted, "Maths")
    answered(scripted, 1)
    until(
        scripted,
        "return [...document.querySelectorAll('math')].some((m) => m.textContent === 'ok')",
        "the last one",
    )
    assert scripted.js("return document.querySelectorAll('.answer :is(a, img, [href], [src])').length") == 0
    assert scripted.js(
        "return [...document.querySelectorAll('.answer *')].every((e) => getComputedStyle(e).position !== 'fixed')"
    )
    assert scripted.js("return window.hit === undefined")


def test_a_growing_answer_keeps_its_earlier_blocks(inside: Browser, script: Script) -> None:
    """So that what is selected or scrolled in them stays; the last block alone is drawn anew."""
    elements = inside.js(
        "const box = document.createElement('div'); showMarkdown(box, 'One.\\n\\n- a\\n\\nTwo');"
        "const before = [...box.children]; showMarkdown(box, 'One.\\n\\n- a\\n\\nTwo *three*');"
        "return [[...box.children].map((each, place) => each === before[place]), box.textContent]"
    )
    assert elements == [[True, True, False], "One.aTwo three"]
    assert (
        inside.js(
            "const box = document.createElement('div'); showMarkdown(box, 'a\\n\\nb\\n\\nc'); showMarkdown(box, 'd');"
            "return box.textContent"
        )
        == "d"
    )


@pytest.mark.parametrize("library", ["highlight-11.12.0.min.js", "temml-0.13.5.min.js"])
def test_only_the_library_itself_runs(inside: Browser, library: str) -> None:
    """The policy knows its text: with one more statement it is not run."""
    outcome = inside.js(
        "const done = fetch('page/' + arguments[0]).then((answer) => answer.text()).then((text) => {"
        "  const add = (text) => { const s = document.createElement('script'); s.text = scripts.createScript(text);"
        "    document.head.append(s); };"
        "  const name = arguments[0].startsWith('temml') ? 'temml' : 'hljs';"
        "  add(text + ';window.hit = 1'); const changed = [Boolean(window[name]), window.hit || 0];"
        "  add(text); return [...changed, Boolean(window[name])]; }); return done",
        library,
    )
    assert outcome == [False, 0, True]
    # The refusal, in the console.
    assert all("policy" in complaint.lower() or complaint == "inline" for complaint in inside.complaints())
    inside.js("window.complaints = []")


@pytest.mark.parametrize("instant", [True, False], ids=["at once", "step by step"])
def test_the_speed_is_the_workers_or_none(window: Browser, instant: bool) -> None:
    """Tokens that come at once have no speed. With steps of 20 ms there are no more than 50 a second."""
    config = FakeEngineConfig(vocab_size=257, instant=instant, step_ms=0 if instant else 20)
    with FakeWorker(config) as worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        visit(window, front.url + "/")
        say(window, "Hello", max_tokens=16)
        answered(window, 1)
        figures = texts(window, ".figures")[0]
        assert figures.startswith("16 tokens · ")
        rate = re.search(r"([\d.]+) tokens/s", figures)
        if instant:
            assert rate is None, figures
        else:
            assert rate is not None, figures
            assert 0 < float(rate[1]) <= 50
        window.get("about:blank")


def test_an_error_is_in_sight_with_the_options_open(scripted: Browser, script: Script) -> None:
    """Also after long answers, and on a phone."""
    script.text = "\n\n".join(f"Paragraph {number}." for number in range(60))
    for count in (1, 2):
        say(scripted, "Hello")
        answered(scripted, count)
    for width in (1200, 390):
        scripted.size(width, 800)
        if width > 400:
            push(scripted, "Options")
        fill(scripted, temperature=9)
        scripted.js("document.getElementById('talk').scrollTop = 0")
        say(scripted, "Again")
        until(scripted, "return document.querySelectorAll('.turn .error').length === 1", "the refusal")
        assert scripted.js(VISIBLE, ".turn .error"), width
        if width > 400:
            push(scripted, "Close the options")
        fill(scripted, temperature="")
        push(scripted, "Try again")
        until(scripted, "return document.querySelectorAll('.turn .error').length === 0", "another try")
        until(scripted, ANSWERED, "its end")


def test_a_server_that_is_gone_is_told_in_our_words(window: Browser, script: Script) -> None:
    """Above the message, and at the question; when the server is back, it can be asked again."""
    with serving(HttpConfig(), lambda *_: script.client) as front:  # type: ignore[arg-type, return-value]
        visit(window, front.url + "/")
        window.js(
            "window.real = window.fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))"
        )
        say(window, "Hello")
        until(window, "return document.querySelectorAll('.turn .error').length === 1", "the failure")
        assert texts(window, ".turn .error span") == ["The server does not answer."]
        until(window, "return document.getElementById('summary').textContent !== ''", "the notice")
        assert texts(window, "#summary") == ["The server does not answer."]
        window.js("window.fetch = window.real")
        until(window, "return document.getElementById('notice').hidden", "the server is back")
        push(window, "Try again")
        answered(window, 1)
        assert texts(window, ".turn .error") == []
        window.get("about:blank")


def test_thinking_without_a_name_is_folded_too(inside: Browser, front: Front) -> None:
    """Some models write tags that the server does not know as theirs."""
    shown = inside.js(
        "const box = document.createElement('div');"
        "drawAnswer(box, {content: '<think>So.</think>Yes.', finish: 'stop'});"
        "return [box.querySelector('.thinking > div').textContent, box.querySelector('.answer').textContent]"
    )
    assert shown == ["So.", "Yes."]
