"""Structured log lines: JSON objects, or text for people. No field holds text of a prompt or an output."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone

import msgspec

from zmqengine.protocol.printable import printable
from zmqengine_http.config import HttpConfig

FIELD_CHARS_MAX = 1000

logger = logging.getLogger("zmqengine.http")


def log(level: int, event: str, **fields: object) -> None:
    """Write one line: the event's name and its fields."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


def info(event: str, **fields: object) -> None:
    """Write one line of level info."""
    log(logging.INFO, event, **fields)


def warning(event: str, **fields: object) -> None:
    """Write one line of level warning."""
    log(logging.WARNING, event, **fields)


def configure(config: HttpConfig) -> None:
    """Send the logs of this package, and the warnings of the web server, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    form = config.log_format
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    for name in ("zmqengine.http", "zmqengine.client", "uvicorn.error"):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.propagate = False
        named.setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logger.level))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _time(record), "level": record.levelname.lower()}
        line["event"] = printable(record.getMessage(), FIELD_CHARS_MAX)
        line |= _fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {key}={_words(value)}" for key, value in _fields(record).items() if value is not None
        )
        message = printable(record.getMessage(), FIELD_CHARS_MAX)
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _words(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The record's fields, with control characters of foreign text escaped so that it cannot forge a log
    line."""
    fields: dict[str, object] = getattr(record, "fields", {})
    return {
        key: printable(value, FIELD_CHARS_MAX) if isinstance(value, str) else value
        for key, value in fields.items()
    }


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
