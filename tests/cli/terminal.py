"""A program in a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from tests.support.stderr import complaints

WAIT_S = 60.0


class Terminal:
    """Runs a command on a pseudo-terminal; `shown` is everything that appeared on it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"} | environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._fd, text.encode())

    def press_ctrl_c(self) -> None:
        """What the terminal does on Ctrl-C: SIGINT to the program."""
        self.process.send_signal(signal.SIGINT)

    def press_ctrl_c_until(self, text: str, *, start: int) -> int:
        """Press it every second until `text` appears after `start`; where it ends."""
        for _ in range(int(WAIT_S)):
            self.press_ctrl_c()
            if select.select([self._fd], [], [], 1.0)[0]:
                return self.wait_for(text, start=start)
        raise AssertionError(f"no {text!r} in {self.shown[start:]!r}")

    def wait_for(self, text: str, *, start: int = 0) -> int:
        """Read until `text` appears after `start`; where it ends."""
        end_s = time.monotonic() + WAIT_S
        while (found := self.shown.find(text, start)) < 0:
            assert self._read(end_s - time.monotonic()), f"no {text!r} in {self.shown[start:]!r}"
        return found + len(text)

    def wait_for_more(self, length: int, *, start: int) -> int:
        """Read until so many characters have appeared after `start`, but for a line that tells how slow the machine is;
        where they end.
        """
        end_s = time.monotonic() + WAIT_S
        while len("\n".join(complaints(self.shown[start:]))) < length:
            assert self._read(end_s - time.monotonic()), f"nothing more after {self.shown!r}"
        return len(self.shown)

    def end(self) -> int:
        """Read until the program has ended; its exit code."""
        end_s = time.monotonic() + WAIT_S
        while self._read(end_s - time.monotonic()):
            pass
        return self.process.wait(max(0.1, end_s - time.monotonic()))

    def close(self) -> None:
        """End it, however far it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, timeout_s))[0]:
            return False
        try:
            received = os.read(self._fd, 65_536)
        except OSError:
            # The other side is closed.
            return False
        self.shown += received.decode(errors="replace").replace("\r\n", "\n")
        return bool(received)
