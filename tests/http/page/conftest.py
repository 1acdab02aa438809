"""Fixtures for tests of the pages: browsers, and front-ends with a fake worker or a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.front import Front, serving
from tests.http.page.browsers import Browser, FirefoxWindow, opened, until
from tests.http.page.steps import Script, visit
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig


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
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def scripted_front(script: Script) -> Iterator[Front]:
    with serving(HttpConfig(), lambda *_: script.client) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def window(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """One window for all tests of a browser."""
    with opened(request.param) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, front: Front) -> Iterator[Browser]:
    """The chat on the fake worker; at the end nothing had failed in the browser's eyes."""
    yield from _fresh(window, front)


@pytest.fixture
def scripted(window: Browser, scripted_front: Front, script: Script) -> Iterator[Browser]:
    """The chat on the scripted model."""
    script.text = "Hi."
    yield from _fresh(window, scripted_front)


@pytest.fixture
def inside(scripted: Browser, window: Browser) -> Browser:
    """The same, for scripts that use what the page defines: Marionette's sandbox does not see its constants."""
    if isinstance(window, FirefoxWindow):
        pytest.skip("Marionette does not see the page's constants")
    return scripted


def _fresh(window: Browser, front: Front) -> Iterator[Browser]:
    window.size(1200, 900)
    window.get(front.url + "/")
    # Nothing of an earlier test.
    window.js(
        "localStorage.clear(); sessionStorage.clear(); const asked = indexedDB.open('zmqengine');"
        "asked.onsuccess = () => { asked.result.transaction('chats', 'readwrite').objectStore('chats').clear()"
        ".onsuccess = () => { asked.result.close(); document.body.dataset.cleared = 1; }; }"
    )
    until(window, "return document.body.dataset.cleared", "the chats are gone")
    visit(window, front.url + "/")
    yield window
    assert window.complaints() == []
