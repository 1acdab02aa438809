"""Structured logs: one line an event, its fields as key=value or as JSON."""

from __future__ import annotations

import json
import logging
import time

from zmqengine.config import LogFormat, LogLevel

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger("zmqengine")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {record.getMessage()}"
        line = f"{line} {fields}" if fields else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
