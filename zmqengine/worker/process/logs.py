"""Structured logs: one line an event, with fields as key=value or JSON; text from front-ends cannot forge a line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from zmqengine.config import LogFormat, LogLevel
from zmqengine.protocol.printable import FIELD_CHARS_MAX, printable, printable_fields, printable_trace

LINES_MAX = 200
"""Maximum lines of one event in a window; further ones are counted. Keeps 20 s of a flood well under 1 MB."""
TRACEBACKS_MAX = 20
"""Maximum tracebacks of one event in a window: each has tens of lines."""
WINDOW_S = 10.0
"""Seconds of a window."""

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from now on."""
    handler = BoundedHandler()
    handler.setFormatter(formatter(form))
    root = logging.getLogger("zmqengine")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def formatter(form: LogFormat) -> logging.Formatter:
    return _Json() if form == "json" else _Text()


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error at a bounded rate: a front-end that provokes an event repeatedly fills no disk.

    Each event gets `LINES_MAX` lines a window, or `TRACEBACKS_MAX` with a traceback. The number of suppressed lines is
    logged with the first line of a later window, or at the close.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._until_s = 0.0
        self._seen: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], logging.LogRecord] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._clock()
        if now_s >= self._until_s:
            self._begin_window(now_s)
        event = (record.name, str(record.msg))
        seen = self._seen[event] = self._seen.get(event, 0) + 1
        if seen > (TRACEBACKS_MAX if record.exc_info else LINES_MAX):
            self._left_out[event] = record
        else:
            super().emit(record)

    def close(self) -> None:
        self._begin_window(self._clock())
        super().close()

    def _begin_window(self, now_s: float) -> None:
        for event, last in self._left_out.items():
            more = self._seen[event] - (TRACEBACKS_MAX if last.exc_info else LINES_MAX)
            text = f"{event[1]}: {more:,} more in {WINDOW_S:.0f} s, not logged one by one"
            super().emit(
                logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, (), None)
            )
        self._until_s = now_s + WINDOW_S
        self._seen.clear()
        self._left_out.clear()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {_message(record)}"
        line = f"{line} {fields}" if fields else line
        if not record.exc_info:
            return line
        # Indented: an exception's message may contain a front-end's text, which must not look like a log line.
        trace = printable_trace(self.formatException(record.exc_info))
        return f"{line}\n    " + "\n    ".join(trace)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _message(record),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = printable_trace(self.formatException(record.exc_info))
        return json.dumps(line)


def _message(record: logging.LogRecord) -> str:
    return printable(record.getMessage(), FIELD_CHARS_MAX)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return printable_fields({key: value for key, value in record.__dict__.items() if key not in _STANDARD})
