"""The power assertion at the border to the system: IOKit by its fake, systemd-inhibit by a program of its name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import wait_until
from zmqengine.worker.process import power
from zmqengine.worker.process.power import asleep_s, power_assertion


class Function:
    """A function of a C library, whose types may be declared."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.argtypes: list[object] = []
        self.restype: object = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        return self.body(*arguments)


class Frameworks:
    """IOKit and CoreFoundation, as far as an assertion needs them; strings are numbers from 1 on."""

    def __init__(self, gives: int = 0) -> None:
        self.strings: dict[int, bytes] = {}
        self.made = 0
        self.held: dict[int, tuple[bytes, int, bytes]] = {}
        self.gives = gives
        self.CFStringCreateWithCString = Function(self.make)
        self.CFRelease = Function(self.strings.pop)
        self.IOPMAssertionCreateWithName = Function(self.create)
        self.IOPMAssertionRelease = Function(lambda number: self.held.pop(number.value))

    def make(self, allocator: None, text: bytes, encoding: int) -> int:
        assert encoding == 0x08000100
        self.made += 1
        self.strings[self.made] = text
        return self.made

    def create(self, kind: int, level: int, name: int, number: Any) -> int:
        if not self.gives:
            number._obj.value = 77
            self.held[77] = (self.strings[kind], level, self.strings[name])
        return self.gives


def on_a_mac(monkeypatch: pytest.MonkeyPatch, frameworks: Frameworks) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: frameworks)


def test_macos_is_asked_for_an_assertion_and_every_string_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against idle sleep of the system, not of the display; `pmset -g assertions` shows our name."""
    frameworks = Frameworks()
    on_a_mac(monkeypatch, frameworks)
    assertion = power_assertion(wanted=True)
    assertion.hold()
    assertion.hold()
    assert frameworks.held == {77: (b"PreventUserIdleSystemSleep", 255, b"zmqengine runs requests")}
    assert frameworks.strings == {}
    assertion.release()
    assertion.release()
    assert frameworks.held == {}
    assert assertion.description == "released"


def test_a_refusal_of_macos_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number."""
    on_a_mac(monkeypatch, Frameworks(gives=0x2C2))
    assertion = power_assertion(wanted=True)
    assertion.hold()
    assertion.release()
    assert assertion.description == "refused: IOPMAssertionCreateWithName gave 0x2c2"


def test_a_mac_without_the_frameworks_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may hide them."""

    def missing(path: str) -> None:
        raise OSError(f"dlopen({path}): no such file")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assertion = power_assertion(wanted=True)
    assertion.hold()
    assert assertion.description.startswith("refused: dlopen")


def test_where_nobody_can_be_asked_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container has no systemd, and the option turns it off everywhere."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(power, "_SYSTEMD", tmp_path / "none")
    for assertion, told in (
        (power_assertion(wanted=True), "no systemd"),
        (power_assertion(wanted=False), "off"),
    ):
        assertion.hold()
        assertion.release()
        assert assertion.description == told


@pytest.mark.parametrize(("platform", "clock"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC")])
def test_sleep_shows_between_two_clocks(monkeypatch: pytest.MonkeyPatch, platform: str, clock: str) -> None:
    """One that stands still in sleep, and one that goes on."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, clock, 70, raising=False)
    monkeypatch.setattr(time, "clock_gettime", lambda number: {70: 5000.0}[number])
    monkeypatch.setattr(time, "monotonic", lambda: 1400.0)
    assert asleep_s() == 3600.0


def test_a_system_without_such_a_clock_never_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an old Linux; and here it is a number that hardly changes."""
    assert abs(asleep_s() - asleep_s()) < 0.5
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert asleep_s() == 0.0


def systemd(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """A `systemd-inhibit` that notes its process, and runs its command."""
    program = directory / "systemd-inhibit"
    program.write_text(f'#!/bin/sh\necho "$$ $*" > {directory}/pid\nshift 3\n"$@"\nrm {directory}/pid\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(power, "_SYSTEMD", directory)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory / "pid"


def test_systemd_inhibits_sleep_until_it_is_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a process, gone afterwards."""
    inhibitor = systemd(monkeypatch, tmp_path)
    assertion = power_assertion(wanted=True)
    for _ in range(2):
        assertion.hold()
        wait_until(lambda: inhibitor.exists() and inhibitor.read_text(), "nothing inhibits")
        assert "--what=sleep:idle --who=zmqengine --why=zmqengine runs requests cat" in inhibitor.read_text()
        # It waits, and does not end by itself.
        backend: Any = assertion._backend
        with pytest.raises(subprocess.TimeoutExpired):
            backend._process.wait(0.2)
        assertion.release()
        assert not inhibitor.exists()


def test_a_killed_worker_leaves_no_inhibitor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGKILL: the machine may sleep again."""
    inhibitor = systemd(monkeypatch, tmp_path)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom zmqengine.worker.process import power\n"
        f"power._SYSTEMD = Path({str(tmp_path)!r})\n"
        "power.power_assertion(wanted=True).hold()\ntime.sleep(600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    wait_until(inhibitor.exists, "nothing inhibits")
    worker.send_signal(signal.SIGKILL)
    worker.wait(60)
    wait_until(lambda: not inhibitor.exists(), "the machine stays awake")
