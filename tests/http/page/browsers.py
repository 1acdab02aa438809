"""Headless Chromium and Firefox behind one small interface, for tests of the pages.

Chromium comes with a driver for selenium. Firefox is spoken to over Marionette, the protocol that geckodriver
translates, as few systems package that driver: https://firefox-source-docs.mozilla.org/testing/marionette/Protocol.html.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.http.front import wait_until

WAIT_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
INSTALLED = {"chromium": bool(CHROMIUM and CHROMEDRIVER), "firefox": bool(FIREFOX)}
KEYS = {
    "Tab": "\ue004", "Shift+Tab": "\ue008\ue004", "Enter": "\ue007", "Escape": "\ue00c", "ArrowRight": "\ue014",
}  # fmt: skip
"""WebDriver's codes."""


class Browser(Protocol):
    """One window of a browser."""

    def get(self, url: str) -> None: ...

    def js(self, script: str, *arguments: object) -> Any: ...

    def keys(self, selector: str, text: str) -> None: ...

    def click(self, selector: str) -> None: ...

    def refresh(self) -> None: ...

    def size(self, width: int, height: int) -> None: ...

    def scheme(self, name: str) -> None: ...

    def picture(self) -> bytes: ...

    def complaints(self) -> list[str]: ...


def until(browser: Browser, script: str, what: str) -> None:
    """Wait until a script returns true."""
    wait_until(lambda: browser.js(script), what, WAIT_S)


def press(browser: Browser, name: str) -> None:
    """Press a key wherever the focus is."""
    browser.js("document.activeElement.dataset.focused = '1'")
    browser.keys("[data-focused='1']", KEYS[name])
    browser.js("for (const each of document.querySelectorAll('[data-focused]')) delete each.dataset.focused")


@contextlib.contextmanager
def opened(name: str) -> Iterator[Browser]:
    """The browser of this name; skips the test if it is not installed."""
    if not INSTALLED[name]:
        pytest.skip(f"{name} is not installed")
    browser: ChromiumWindow | FirefoxWindow = ChromiumWindow() if name == "chromium" else started_firefox()
    try:
        yield browser
    finally:
        browser.close()


class ChromiumWindow:
    """Chromium through selenium."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        options = webdriver.ChromeOptions()
        for argument in (
            "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900",
        ):  # fmt: skip
            options.add_argument(f"--{argument}")
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
        self._driver.set_page_load_timeout(WAIT_S)

    def close(self) -> None:
        self._driver.quit()

    def get(self, url: str) -> None:
        self._driver.get(url)

    def js(self, script: str, *arguments: object) -> Any:
        return self._driver.execute_script(script, *arguments)

    def keys(self, selector: str, text: str) -> None:
        self._driver.find_element("css selector", selector).send_keys(text)

    def click(self, selector: str) -> None:
        self._driver.find_element("css selector", selector).click()

    def refresh(self) -> None:
        self._driver.refresh()

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self) -> bytes:
        return base64.b64decode(self._driver.get_screenshot_as_base64())

    def complaints(self) -> list[str]:
        """Errors in the console, but those of refused requests, which a page shows itself."""
        entries = [entry for entry in self._driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [entry["message"] for entry in entries if "status of" not in entry["message"]]


def started_firefox() -> FirefoxWindow:
    """A window of Firefox, which may fail to start once: on a busy machine it closed its first connection at once."""
    try:
        return FirefoxWindow()
    except (AssertionError, OSError) as error:
        print(f"Firefox did not start, tried once more: {error}")
        return FirefoxWindow()


class FirefoxWindow:
    """Firefox through Marionette."""

    def __init__(self) -> None:
        self._profile = Path(tempfile.mkdtemp(prefix="firefox-"))
        self._log = self._profile / "log"
        # Firefox takes a free port itself: one chosen here could be another server's by the time it listens.
        (self._profile / "user.js").write_text(
            'user_pref("marionette.port", 0);\nuser_pref("dom.disable_open_during_load", false);\n'
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(FIREFOX), "--headless", "--marionette", "--remote-allow-system-access", "--no-remote",
                 "--profile", str(self._profile), "--width", "1200", "--height", "900"],
                stdout=log, stderr=log, env={**os.environ, "MOZ_HEADLESS": "1"},
            )  # fmt: skip
        self._socket: socket.socket | None = None
        self._rest = b""
        self._number = 0
        try:
            self._socket = socket.create_connection(("127.0.0.1", self._port()), timeout=WAIT_S)
            self._read()
            self._ask("WebDriver:NewSession", capabilities={})
            self._ask("WebDriver:SetTimeouts", pageLoad=int(WAIT_S * 1000), script=int(WAIT_S * 1000))
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        """The port that Firefox writes into its profile once it listens."""
        file = self._profile / "MarionetteActivePort"
        until_s = time.monotonic() + WAIT_S
        while not (file.exists() and file.read_text().strip()):
            assert time.monotonic() < until_s, f"Firefox does not listen\n{self._said()}"
            assert self._process.poll() is None, f"Firefox has ended\n{self._said()}"
            time.sleep(0.1)
        return int(file.read_text())

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def _read(self) -> Any:
        """A message: its length in decimal, a colon, JSON."""
        while b":" not in self._rest:
            self._rest += self._some()
        length, _, self._rest = self._rest.partition(b":")
        while len(self._rest) < int(length):
            self._rest += self._some()
        message, self._rest = self._rest[: int(length)], self._rest[int(length) :]
        return json.loads(message)

    def _some(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        assert data, f"Firefox closed the connection\n{self._said()}"
        return data

    def _ask(self, command: str, **parameters: object) -> Any:
        self._number += 1
        data = json.dumps([0, self._number, command, parameters]).encode()
        assert self._socket is not None
        self._socket.sendall(f"{len(data)}:".encode() + data)
        kind, number, error, result = self._read()
        assert (kind, number) == (1, self._number)
        assert error is None, f"{command}: {error}"
        return result

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._ask("Marionette:Quit", flags=["eForceQuit"])
        if self._socket is not None:
            self._socket.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def get(self, url: str) -> None:
        self._ask("WebDriver:Navigate", url=url)
        self.js(
            "window.complaints = []; addEventListener('error', (e) => window.complaints.push(e.message));"
            "addEventListener('unhandledrejection', (e) => window.complaints.push(String(e.reason)));"
            "addEventListener('securitypolicyviolation', (e) => window.complaints.push(e.blockedURI))"
        )

    def js(self, script: str, *arguments: object) -> Any:
        result = self._ask("WebDriver:ExecuteScript", script=script, args=list(arguments), sandbox=None)
        return result["value"]

    def _element(self, selector: str) -> str:
        found = self._ask("WebDriver:FindElement", using="css selector", value=selector)["value"]
        return str(next(iter(found.values())))

    def keys(self, selector: str, text: str) -> None:
        self._ask("WebDriver:ElementSendKeys", id=self._element(selector), text=text)

    def click(self, selector: str) -> None:
        self._ask("WebDriver:ElementClick", id=self._element(selector))

    def refresh(self) -> None:
        self._ask("WebDriver:Refresh")

    def size(self, width: int, height: int) -> None:
        # The window has a frame: what counts is the page.
        self._ask("WebDriver:SetWindowRect", width=width, height=height)
        inner = self.js("return [innerWidth, innerHeight]")
        if inner != [width, height]:
            rect = {"width": 2 * width - inner[0], "height": 2 * height - inner[1]}
            self._ask("WebDriver:SetWindowRect", **rect)

    def scheme(self, name: str) -> None:
        value = 0 if name == "dark" else 1
        self._ask("Marionette:SetContext", value="chrome")
        self.js(f"Services.prefs.setIntPref('layout.css.prefers-color-scheme.content-override', {value})")
        self._ask("Marionette:SetContext", value="content")

    def picture(self) -> bytes:
        return base64.b64decode(self._ask("WebDriver:TakeScreenshot", full=False)["value"])

    def complaints(self) -> list[str]:
        """Errors that no script caught, and what the policy of the page forbade."""
        return [str(each) for each in self.js("return window.complaints || []")]
