"""Structured log lines: JSON objects, or text for people. Each is bounded, and without `log_prompts` none holds text of
a caller but the id that it gave its request."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import datetime, timezone

import msgspec

from zmqengine.protocol.printable import (
    FIELD_CHARS_MAX,
    FIELDS_CHARS_MAX,
    printable,
    printable_fields,
    printable_trace,
)
from zmqengine_http.config import HttpConfig

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
    handler.setFormatter((_JsonFormatter if form == "json" else _TextFormatter)(config.log_prompts))
    for name in ("zmqengine.http", "zmqengine.client", "uvicorn.error"):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.propagate = False
        named.setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logger.level))


class _BoundedFormatter(logging.Formatter):
    """`with_texts`: tracebacks end with the message of the exception, which may quote a request."""

    def __init__(self, with_texts: bool) -> None:
        super().__init__()
        self._with_texts = with_texts

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """The record's fields, of which prompts may fill the line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        return printable_fields(fields, FIELDS_CHARS_MAX if self._with_texts else FIELD_CHARS_MAX)

    def trace(self, record: logging.LogRecord) -> list[str]:
        """The lines of the record's traceback; none without an exception."""
        if not record.exc_info or record.exc_info[0] is None:
            return []
        kind, _, frames = record.exc_info
        if self._with_texts:
            return printable_trace(self.formatException(record.exc_info))
        return printable_trace("".join(traceback.format_tb(frames)) + kind.__qualname__)


class _JsonFormatter(_BoundedFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _time(record), "level": record.levelname.lower()}
        line["event"] = printable(record.getMessage(), FIELD_CHARS_MAX)
        line |= self.fields(record)
        if trace := self.trace(record):
            line["traceback"] = "\n".join(trace)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _TextFormatter(_BoundedFormatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {key}={_words(value)}" for key, value in self.fields(record).items() if value is not None
        )
        message = printable(record.getMessage(), FIELD_CHARS_MAX)
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {message}{fields}"
        return "\n    ".join([line, *self.trace(record)])


def _words(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
