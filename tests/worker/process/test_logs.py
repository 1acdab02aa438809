"""Log lines: whatever a front-end says, it writes no line of its own, and no flood fills the disk."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from zmqengine.config import LogFormat
from zmqengine.protocol.printable import FIELD_CHARS_MAX, FIELDS_CHARS_MAX, TRACE_LINES_MAX
from zmqengine.worker.process import logs

FORGED = "a\n12:00:00.000 critical giving up: forged line\x1b[2J\0\u2028b"


class Capture:
    """A logger with the worker's handler, writing into memory."""

    def __init__(self, form: LogFormat) -> None:
        self.now_s = 0.0
        self.text = io.StringIO()
        self.handler = logs.BoundedHandler(clock=lambda: self.now_s)
        self.handler.setStream(self.text)
        self.handler.setFormatter(logs.formatter(form))
        self.log = logging.Logger("zmqengine.test")
        self.log.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


@pytest.fixture
def text() -> Iterator[Capture]:
    capture = Capture("text")
    yield capture
    capture.handler.close()


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_field_and_no_message_writes_a_line_of_its_own(form: LogFormat) -> None:
    """A request id, a client's name, an error's message: one line each, printable, with nothing for a terminal."""
    capture = Capture(form)
    capture.log.info("ended", extra={"request": FORGED, "client": FORGED, "requests": [FORGED]})
    capture.log.critical("giving up: %s", FORGED)
    assert len(capture.text.getvalue().split("\n")) == 3
    assert all(line.isprintable() for line in capture.text.getvalue().split("\n"))
    if form == "json":
        for line in capture.lines:
            assert all(_is_printable(value) for value in json.loads(line).values())


def _is_printable(value: object) -> bool:
    return str(value).isprintable()


def test_a_line_of_a_traceback_does_not_look_like_a_line_of_the_log(text: Capture) -> None:
    """The message of an exception may hold what a front-end sent."""
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        text.log.error("internal error", exc_info=error)
    assert [line for line in text.lines if not line.startswith("    ")] == [text.lines[0]]
    assert "\0" not in text.text.getvalue()
    assert "\x1b" not in text.text.getvalue()


def test_a_flood_of_one_event_is_counted_and_the_others_are_logged(text: Capture) -> None:
    """12,345 refusals: some lines, the rest as a number once the window is over."""
    for _ in range(12_345):
        text.log.warning("subscription refused", extra={"topic_bytes": 9})
    text.log.info("ended")
    assert len(text.lines) == logs.LINES_MAX + 1
    text.now_s += logs.WINDOW_S
    text.log.info("ended")
    assert len(text.lines) == logs.LINES_MAX + 3
    assert f"subscription refused: {12_345 - logs.LINES_MAX:,} more in 10 s" in text.lines[-2]


def test_what_was_left_out_is_told_at_the_end(text: Capture) -> None:
    """A worker that ends within the window says it all the same."""
    for _ in range(logs.LINES_MAX + 7):
        text.log.info("rejected")
    text.handler.close()
    assert "rejected: 7 more" in text.lines[-1]


def test_a_long_field_is_cut(text: Capture) -> None:
    """Many long fields make no long line."""
    text.log.info("slow pass", extra={"requests": ["x" * 5000] * 5000, "reason": "y" * 100_000})
    assert len(text.lines[0]) < FIELDS_CHARS_MAX + 1000
    text.log.info("slow pass", extra={f"field{number}": "x" * 5000 for number in range(100)})
    assert len(text.lines[1]) < FIELDS_CHARS_MAX + 3000


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_is_bounded(form: LogFormat) -> None:
    """Its message may be a megabyte of a front-end, in as many lines."""
    capture = Capture(form)
    try:
        raise ValueError("x" * 1_000_000 + "\n" * 100_000)
    except ValueError as error:
        capture.log.error("internal error", exc_info=error)
    assert len(capture.text.getvalue()) < (TRACE_LINES_MAX + 1) * (FIELD_CHARS_MAX + 20)
