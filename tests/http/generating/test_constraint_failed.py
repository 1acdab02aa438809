"""A limit of a constraint that the output meets is an error of its own over HTTP, in each API, and never `stop`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, Reply, post, serving
from tests.http.tool_directory import tool_directory
from tests.support.hostile_constraints import OVER_A_LIMIT_PATTERN
from tests.support.workers import WorkerProcess
from zmqengine_http import HttpConfig

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": f"^{OVER_A_LIMIT_PATTERN}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED: Any = {"strict": True, "name": "story", "schema": SCHEMA}
MESSAGES: Any = [{"role": "user", "content": "Tell me about Tom."}]
FUNCTION: Any = {"name": "tell", "strict": True, "parameters": SCHEMA}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": NAMED}},
    ),
    "chat, tool call": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "completions": ("/v1/completions", {"prompt": "Once", "guided_regex": OVER_A_LIMIT_PATTERN}),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "messages, tool call": (
        "/v1/messages",
        {
            "messages": MESSAGES, "tools": [{"name": "tell", "strict": True, "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses": ("/v1/responses", {"input": "Tell.", "text": {"format": {"type": "json_schema", **NAMED}}}),
    "responses, tool call": (
        "/v1/responses",
        {"input": "Tell.", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
}  # fmt: skip
# Reasons to end by which an output would count as whole.
WHOLE = re.compile(
    r'"(?:finish_reason|stop_reason|status)": ?"(?:stop|tool_calls|end_turn|tool_use|stop_sequence|completed)"'
)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory = tool_directory(tmp_path_factory.mktemp("models"))
    with WorkerProcess(None, model=str(directory)) as worker:
        worker.wait_ready()
        with serving(HttpConfig(workers=(worker.address,))) as front:
            yield front


def ask(front: Front, name: str, **fields: object) -> Reply:
    path, body = ASKED[name]
    tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return post(front, path, {"model": "tools", "temperature": 0, tokens: 600, **body, **fields})


@pytest.mark.parametrize("name", ASKED)
def test_a_whole_answer_is_a_422(front: Front, name: str) -> None:
    """With the code, and with the limit in place of the output."""
    reply = ask(front, name)
    assert reply.status == 422, reply.body
    assert "too many expressions" in reply.json["error"]["message"]
    if not name.startswith("messages"):
        # Messages has types of errors and no codes.
        assert reply.json["error"]["code"] == "constraint_failed"


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_ends_with_an_error_event(front: Front, name: str) -> None:
    """The output that came before stays; nothing says that it is whole."""
    reply = ask(front, name, stream=True)
    assert reply.status == 200
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in reply.body.split(b"\n")
        if line.startswith(b"data: {")
    ]
    errors = [event for event in events if "too many expressions" in json.dumps(event.get("error", event))]
    assert len(errors) == 1, reply.body[-2000:]
    assert "error" in json.dumps(errors[0])
    # Tokens that came together are one event.
    assert len(events) > 2
    assert not WHOLE.search(reply.body.decode())
