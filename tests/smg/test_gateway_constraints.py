"""Constrained output through the real gateway, on workers with the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")
pytest.importorskip("llguidance", reason="the worker is not installed")

from tests.smg.real_gateway import Fleet, fleet

ASK = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 60, "seed": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def site() -> Iterator[Fleet]:
    """The gateway over ZeroMQ: over gRPC it refuses constraints to every MLX backend."""
    with fleet("zmq", None) as site:
        yield site


def test_an_answer_follows_a_json_schema(site: Fleet) -> None:
    """Whatever the model would have said."""
    form = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    answer = site.gateway.ask("/v1/chat/completions", ASK | {"response_format": form})
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert json.loads(choice["message"]["content"])["city"] in ("Oslo", "Rome")
    assert choice["finish_reason"] == "stop"


def test_a_completion_follows_an_expression(site: Fleet) -> None:
    """Streamed."""
    answer = site.gateway.complete("A number:", regex="[0-9]{3}", stream=True, max_tokens=20)
    assert re.fullmatch("[0-9]{3}", answer.text)


def test_a_tool_that_must_be_called_is_called(site: Fleet) -> None:
    """The gateway makes a schema of the tool that `tool_choice` names."""
    tool = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA}}
    body = ASK | {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "visit"}}}
    answer = site.gateway.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "visit"
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
