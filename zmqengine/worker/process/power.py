"""Sleep of the machine: its duration, and a power assertion that prevents idle sleep.

macOS: `IOPMAssertionCreateWithName` of IOKit, which `pmset -g assertions` lists. Linux: `systemd-inhibit` around a
process that waits for the end of its standard input. The end of this process drops the assertion. Closing a
laptop's lid puts it to sleep all the same.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("zmqengine.worker")

REASON = "zmqengine runs requests"
_FRAMEWORKS = "/System/Library/Frameworks"
# IOKit/pwr_mgt/IOPMLib.h and CoreFoundation/CFString.h
_ASSERTION_TYPE = b"PreventUserIdleSystemSleep"
_LEVEL_ON = 255
_UTF8 = 0x08000100
_SYSTEMD = Path("/run/systemd/system")


def asleep_s() -> float:
    """Seconds that this machine has slept since its start, up to the drift between two clocks.

    `time.monotonic` stands still in sleep, on macOS (mach_absolute_time) and on Linux (CLOCK_MONOTONIC); these go on:
    macOS' CLOCK_MONOTONIC (clock_gettime(3)) and Linux' CLOCK_BOOTTIME.
    """
    going_on = time.CLOCK_MONOTONIC if sys.platform == "darwin" else getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if going_on is None else time.clock_gettime(going_on) - time.monotonic()


class _Backend(Protocol):
    def take(self) -> None:
        """Raise `OSError` if the system refuses."""

    def drop(self) -> None:
        """Once after each `take`."""


class Wired(Protocol):
    """The engine's wired memory. Both calls are idempotent."""

    def wire(self) -> None: ...

    def unwire(self) -> None: ...


class PowerAssertion:
    """A power assertion, held or not; `description` says which. Neither call raises."""

    def __init__(self, backend: _Backend | None, description: str = "released") -> None:
        self._backend = backend
        self._held = False
        self.description = description

    def hold(self) -> None:
        """Keep the machine awake. Idempotent; once the system has refused, it is not asked again."""
        if self._backend is None or self._held:
            return
        try:
            self._backend.take()
        except OSError as error:
            self._backend = None
            self.description = f"refused: {error}"
            log.warning("the machine may sleep while requests run", extra={"reason": str(error)})
            return
        self._held = True
        self.description = "held"

    def release(self) -> None:
        """Let the machine sleep. Idempotent."""
        if self._held and self._backend is not None:
            self._held = False
            self.description = "released"
            self._backend.drop()


def power_assertion(*, wanted: bool) -> PowerAssertion:
    """The assertion of this system; a no-op where there is none, or it is not `wanted`."""
    if not wanted:
        return PowerAssertion(None, "off")
    try:
        if sys.platform == "darwin":
            return PowerAssertion(_MacAssertion())
    except (OSError, AttributeError) as error:
        return PowerAssertion(None, f"refused: {error}")
    command = shutil.which("systemd-inhibit")
    # Without systemd, as in a container, nothing sends the machine to sleep.
    if command is None or not _SYSTEMD.exists():
        return PowerAssertion(None, "no systemd")
    return PowerAssertion(_Inhibitor(command))


class _MacAssertion:
    def __init__(self) -> None:
        self._iokit: Any = ctypes.CDLL(f"{_FRAMEWORKS}/IOKit.framework/IOKit")
        self._foundation: Any = ctypes.CDLL(f"{_FRAMEWORKS}/CoreFoundation.framework/CoreFoundation")
        self._id = ctypes.c_uint32(0)
        make_string = self._foundation.CFStringCreateWithCString
        make_string.restype = ctypes.c_void_p
        make_string.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32]
        self._foundation.CFRelease.argtypes = [ctypes.c_void_p]
        self._foundation.CFRelease.restype = None
        create = self._iokit.IOPMAssertionCreateWithName
        create.restype = ctypes.c_int
        create.argtypes = [
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32),
        ]  # fmt: skip
        self._iokit.IOPMAssertionRelease.argtypes = [ctypes.c_uint32]

    def take(self) -> None:
        strings = [
            self._foundation.CFStringCreateWithCString(None, text, _UTF8)
            for text in (_ASSERTION_TYPE, REASON.encode())
        ]
        failed = self._iokit.IOPMAssertionCreateWithName(
            strings[0], _LEVEL_ON, strings[1], ctypes.byref(self._id)
        )
        for string in strings:
            self._foundation.CFRelease(string)
        if failed:
            raise OSError(f"IOPMAssertionCreateWithName gave {failed:#x}")

    def drop(self) -> None:
        self._iokit.IOPMAssertionRelease(self._id)


class _Inhibitor:
    def __init__(self, command: str) -> None:
        self._command = [command, "--what=sleep:idle", "--who=zmqengine", f"--why={REASON}", "cat"]
        self._process: subprocess.Popen[bytes] | None = None

    def take(self) -> None:
        # Its input ends with this process, however that ends.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def drop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None
