"""The page at /, in a real browser: it shows, chats, keeps to its policy, and outlives a worker.

`ZMQENGINE_SCREENSHOTS` names a directory for pictures of it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.serving import Front, get, post, serving, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium and its driver are not installed")
Browser = Any
WAIT_S = 60.0


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """Slow enough that an answer can be interrupted."""
    with FakeWorker(FakeEngineConfig(vocab_size=257, step_ms=10), process=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    """A front-end on that worker."""
    with serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        yield front


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests of the file."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1200,900",
    ):
        options.add_argument(f"--{argument}")
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(WAIT_S)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Browser, front: Front) -> Iterator[Browser]:
    """The page, opened; at the end nothing was refused or failed in the browser's eyes."""
    chromium.get(front.url + "/")
    until(chromium, "return document.body.dataset.ready === '1'", "the page sees the worker")
    yield chromium
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def until(browser: Browser, script: str, what: str) -> None:
    """Wait until a script returns true."""
    wait_until(lambda: browser.execute_script(script), what, WAIT_S)


def say(browser: Browser, text: str, **options: object) -> None:
    """Fill in the options, type, press Enter."""
    for name, value in options.items():
        browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))
    browser.find_element("id", "text").send_keys(text + "\n")


def picture(browser: Browser, name: str) -> None:
    """Keep what it looks like, if somebody wants to look."""
    if os.environ.get("ZMQENGINE_SCREENSHOTS"):
        browser.save_screenshot(str(Path(os.environ["ZMQENGINE_SCREENSHOTS"]) / f"{name}.png"))


def test_a_program_gets_json_and_a_browser_the_page(front: Front) -> None:
    """By what they accept."""
    assert get(front, "/").json["name"] == "zmqengine"
    reply = get(front, "/", accept="text/html,*/*")
    assert reply.body == page().body
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    """One document; what models say is only ever text."""
    text = page().body.decode()
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "http://" not in text
    assert "https://" not in text
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text


@in_browser
def test_it_chats_and_shows_what_each_token_could_have_been(browser: Browser) -> None:
    """Hovering, or the arrow keys, name the probabilities; a second message carries the first."""
    say(browser, "Hello", max_tokens=12, seed=1)
    until(browser, "return document.querySelectorAll('.token').length > 3", "tokens")
    until(browser, "return !document.getElementById('send').disabled", "the answer's end")
    until(browser, "return /12 tokens in/.test(document.getElementById('usage').textContent)", "the usage")
    browser.find_element("id", "talk").click()
    from selenium.webdriver.common.keys import Keys

    browser.find_element("id", "talk").send_keys(Keys.ARROW_RIGHT)
    until(browser, "return !document.getElementById('tip').hidden", "probabilities")
    tip = browser.execute_script("return document.getElementById('tip').textContent")
    # Alternatives that are parts of characters read alike and are shown as one: the fake model makes such tokens too.
    assert len(tip.splitlines()) >= (1 if "\ufffd" in tip else 5)
    assert all(re.search(r"\d %  \"", line) for line in tip.splitlines())
    picture(browser, "chat")
    say(browser, "And then?", max_tokens=4)
    until(browser, "return document.querySelectorAll('.turn.assistant').length === 2", "a second answer")
    until(browser, "return !document.getElementById('send').disabled", "its end")
    assert not browser.find_elements("css selector", ".turn.error")


@in_browser
def test_tokens_that_come_together_are_shown_one_by_one(chromium: Browser) -> None:
    """Parts of characters among them or not: what hovers is all of the text, and nothing else."""
    with (
        FakeWorker(FakeEngineConfig(vocab_size=257, instant=True)) as worker,
        serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front,
    ):
        chromium.get(front.url + "/")
        until(chromium, "return document.body.dataset.ready === '1'", "the page sees the worker")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "seed": 1}
        text = post(front, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        # The model's tokens are random bytes: most that are no letter of ASCII are parts of nothing.
        letters = sum(character.isascii() for character in text)
        assert 10 < letters < 30
        say(chromium, "Hello", max_tokens=40, seed=1)
        until(
            chromium, "return /40 tokens in/.test(document.getElementById('usage').textContent)", "all of it"
        )
        shown = (
            "return [...document.querySelectorAll('.turn.assistant .token')].map((each) => each.textContent)"
        )
        tokens = chromium.execute_script(shown)
        assert "".join(tokens) == text
        assert [token for token in tokens if token.isascii()] == [token for token in text if token.isascii()]
        assert max(map(len, tokens)) > 1
        # It would ask on when nobody answers any more.
        chromium.get("about:blank")


@in_browser
def test_escape_stops_an_answer_and_the_worker_stops_too(browser: Browser) -> None:
    """The request is in the table while it runs, and gone afterwards."""
    from selenium.webdriver.common.keys import Keys

    say(browser, "Hello", max_tokens=3000)
    until(browser, "return document.querySelectorAll('#requests tr').length === 1", "the request is listed")
    browser.find_element("id", "text").send_keys(Keys.ESCAPE)
    until(browser, "return !document.getElementById('send').disabled", "it stopped")
    until(browser, "return document.querySelectorAll('#requests tr').length === 0", "the worker stopped")


@in_browser
def test_an_answer_outlives_the_death_of_its_worker(browser: Browser, worker: FakeWorker) -> None:
    """It is silent for a while, then says every token."""
    say(browser, "Hello", max_tokens=150)
    until(browser, "return document.querySelectorAll('.token').length > 10", "the answer began")
    worker.kill()
    until(browser, "return document.body.dataset.ready === '0'", "the page sees the death")
    assert "silent" in browser.find_element("id", "workers").text
    worker.start()
    until(browser, "return document.body.dataset.ready === '1'", "the page sees it return")
    until(browser, "return /150 tokens in/.test(document.getElementById('usage').textContent)", "every token")
    assert not browser.find_elements("css selector", ".turn.error")


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(browser: Browser, scheme: str) -> None:
    """Nothing to scroll sideways, and text that stands out from its ground."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wide = "return document.documentElement.scrollWidth <= window.innerWidth"
        until(browser, wide, "it fits")
        colours = browser.execute_script(
            "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        )
        assert contrast(*colours) >= 7
        picture(browser, f"phone-{scheme}")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@in_browser
def test_a_key_is_asked_for_once(chromium: Browser, worker: FakeWorker) -> None:
    """And kept for the tab."""
    with serving(HttpConfig(workers=(worker.address,), probe_ms=200, api_keys=("secret-key",))) as front:
        chromium.get(front.url + "/")
        until(chromium, "return document.getElementById('ask').open", "it asks")
        chromium.find_element("id", "key").send_keys("secret-key\n")
        until(chromium, "return document.body.dataset.ready === '1'", "it goes on")
        say(chromium, "Hello", max_tokens=5)
        until(
            chromium, "return /5 tokens in/.test(document.getElementById('usage').textContent)", "an answer"
        )
        chromium.refresh()
        until(chromium, "return document.body.dataset.ready === '1'", "the key was kept")


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
