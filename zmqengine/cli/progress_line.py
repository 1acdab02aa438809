"""A progress line on the terminal, erased at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

_FIRST_AFTER_S = 0.3
_EVERY_S = 0.1
_ERASE = "\r\x1b[2K"


class ProgressLine:
    """While entered, shows the text that `say` returns on standard error, if that is a terminal and time permits.

    `say` runs on another thread and returns None for nothing to show. `stop()` erases the line.
    """

    def __init__(self, say: Callable[[], str | None]) -> None:
        self._say = say
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase it. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        shown = ""
        wait_s = _FIRST_AFTER_S
        while not self._stopped.wait(wait_s):
            text = self._say() or ""
            if text != shown:
                sys.stderr.write(_ERASE + text)
                sys.stderr.flush()
            shown, wait_s = text, _EVERY_S
        if shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


def bar(fraction: float, width: int = 24) -> str:
    """`[######      ]  25 %`; a fraction outside 0 to 1 is clamped."""
    fraction = max(0.0, min(1.0, fraction))
    full = round(fraction * width)
    return f"[{'#' * full}{' ' * (width - full)}] {fraction * 100:3.0f} %"
