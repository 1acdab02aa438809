"""The server's log holds what the client library says, too."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.http.front import call, serving
from zmqengine.testing import FakeWorker
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


KEY = "a-long-enough-key"
MARK = "Zebra"


def odd_requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Requests with a caller's text in every place that is not a prompt."""
    long = MARK * 20_000
    return [
        ("POST", "/v1/responses", {"model": "fake", "input": "x", "tools": [{"type": long}] * 100}),
        ("POST", "/v1/responses", {"model": "fake", "input": [{"type": f"{MARK}{n}"} for n in range(500)]}),
        ("POST", "/v1/responses", {"model": "fake", "input": "x", "reasoning": {"effort": MARK}}),
        ("POST", "/v1/chat/completions", {"model": "fake", "messages": [], MARK: 1, f"{MARK}2": long}),
        ("POST", "/v1/chat/completions", {"model": long, "messages": [{"role": "user", "content": MARK}]}),
        (
            "POST",
            "/v1/messages",
            {"model": MARK, "max_tokens": 1, "messages": [{"role": MARK, "content": MARK}]},
        ),
        ("GET", f"/v1/responses/{MARK}", {}),
        ("GET", f"/{MARK}?{MARK}", {}),
        (MARK.upper(), "/v1/models", {}),
        (
            "POST",
            "/v1/completions",
            {"model": "fake", "prompt": MARK, "stop": MARK, "guided_regex": f"({MARK}"},
        ),
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("unknown", ["refuse", "ignore"])
def test_no_line_holds_text_of_a_caller_and_each_is_short(
    worker: FakeWorker, capsys: pytest.CaptureFixture[str], log_format: str, unknown: str
) -> None:
    """Types of tools and items, names of fields and models, paths: whatever it is, and however long."""
    config = HttpConfig(
        workers=(worker.address,),
        log_format=log_format,  # type: ignore[arg-type]
        unknown_fields=unknown,  # type: ignore[arg-type]
        log_level="debug",
        api_keys=(KEY,),
    )
    logs.configure(config)
    asked = odd_requests()
    with serving(config) as front:
        for method, path, body in asked:
            data = json.dumps(body).encode() if body else None
            call(
                front,
                method,
                path,
                data,
                {"authorization": f"Bearer {KEY}", "content-type": "application/json"},
            )
    written = capsys.readouterr().err
    assert written.count("request") >= len(asked) - 1
    assert MARK.lower() not in written.lower()
    assert max(map(len, written.splitlines())) < 2000


def test_a_failure_is_logged_by_its_kind_and_place_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The message of an exception may quote a prompt."""
    for texts in (False, True):
        logs.configure(HttpConfig(log_prompts=texts, log_format="json"))
        try:
            raise ValueError(f"{MARK} " * 10_000)
        except ValueError as error:
            logs.logger.error("request failed", exc_info=error)
        written = capsys.readouterr().err
        assert "ValueError" in written
        assert "test_log_lines.py" in written
        assert (MARK in written) == texts
        assert len(written) < 20_000
