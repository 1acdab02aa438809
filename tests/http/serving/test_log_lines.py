"""The server's log holds what the client library says, too."""

from __future__ import annotations

import json
import logging

import pytest

from zmqengine_http.config import HttpConfig
from zmqengine_http.serving import logs


@pytest.fixture(autouse=True)
def _loggers() -> object:
    """Other tests find the loggers as they were."""
    names = ("zmqengine.http", "zmqengine.client", "uvicorn.error")
    before = {
        name: (log.handlers, log.propagate, log.level) for name in names if (log := logging.getLogger(name))
    }
    yield
    for name, (handlers, propagate, level) in before.items():
        log = logging.getLogger(name)
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def test_a_line_of_the_client_library_is_a_line_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """ "lost" and "restarted" are JSON among JSON."""
    logs.configure(HttpConfig(log_format="json"))
    logging.getLogger("zmqengine.client").warning("the worker is lost")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("warning", "the worker is lost")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_field_writes_a_line_of_its_own(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    """Model names and paths come from strangers."""
    logs.configure(HttpConfig(log_format=log_format))  # type: ignore[arg-type]
    logs.warning("refused", model="a\nforged\x1b[2J\0")
    (line, rest) = capsys.readouterr().err.split("\n")
    assert rest == ""
    assert line.isprintable()
