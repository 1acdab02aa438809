"""Whole sessions of an agent on a real worker: what is computed again, and what a worker's death does."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tests.http.agents.requests import claude_request, codex_request
from tests.http.agents.scripted_agent import TEMPLATE
from tests.http.agents.sse import events, types
from tests.http.front import WAIT_S, Front, post, serving
from tests.support.workers import WorkerProcess
from zmqengine.bench.models.model_shapes import SHAPES
from zmqengine.bench.models.random_model import make_model
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine_http import HttpConfig

TURNS = 10
SAID_TOKENS = 12
DEFERRED: dict[str, Any] = {
    # First by name, so that it would change the head from its start.
    "name": "AFetch",
    "description": "Gets a page",
    "input_schema": {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
    "defer_loading": True,
}


class Turn(NamedTuple):
    """What one request cost, in tokens, and what the model said."""

    prompt: int
    cached: int
    said: str


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A random model with 16,384 tokens of context and a template that has tools."""
    path = tmp_path_factory.mktemp("models") / "agent"
    make_model("0.2m", SHAPES["0.2m"], path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    with WorkerProcess(None, model=str(path), supervise=False) as worker:
        yield worker


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with serving(HttpConfig(workers=(worker.address,), aliases={"*": "agent"})) as front:
        yield front


def test_from_the_second_turn_on_only_what_is_new_is_computed(front: Front) -> None:
    """Ten turns of Claude Code: the billing line, the countdown and a system message change with each."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go 0"}]
    turns = []
    for number in range(TURNS):
        turns.append(ask_claude(front, messages, number))
        messages += answered(number, turns[-1].said)
    assert_only_the_new(turns)


def test_a_tool_that_a_search_found_leaves_the_head_as_it_was(front: Front) -> None:
    """Claude Code sends the definition of a found tool with all further turns, marked as deferred."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "find a tool"}]
    turns = [ask_claude(front, messages, 50)]
    result = [{"type": "tool_reference", "tool_name": "AFetch"}]
    for number in (51, 52):
        messages += answered(number, turns[-1].said, result)
        turns.append(ask_claude(front, messages, number, more_tools=[DEFERRED]))
        result = [{"type": "text", "text": "a page"}]
    assert_only_the_new(turns, new_max=400)
    # The second turn holds the definition, and its result alone would be a few tokens.
    assert turns[1].prompt - turns[0].prompt > turns[2].prompt - turns[1].prompt + 40


def test_without_a_stable_head_all_of_it_is_computed_again(worker: WorkerProcess) -> None:
    """What the cure is worth; and that the changes of the session are real ones."""
    config = HttpConfig(workers=(worker.address,), aliases={"*": "agent"}, stable_head=False)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "another session"}]
    with serving(config) as front:
        first = ask_claude(front, messages, 100)
        second = ask_claude(front, messages + answered(100, first.said), 101)
    # The tools come before the system prompt here, so they at least are found again.
    assert second.prompt - second.cached > 200
    assert second.cached < first.prompt - 200


def test_a_session_of_codex_is_found_again_too(front: Front) -> None:
    """Its items, with an additional developer message in every turn, become a prompt that only grows."""
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "go"}]
    turns = []
    for number in range(4):
        body = codex_request(items, size=2000, max_output_tokens=SAID_TOKENS)
        reply = post(front, "/v1/responses", body)
        response = events(reply.body)[-1]["response"]
        usage = response["usage"]
        turns.append(Turn(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], ""))
        call = {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": "tool_1",
            "arguments": '{"field_0": "x"}',
        }
        output = {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"}
        note = {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": f"note {number}"}],
        }
        items = [*items, *response["output"], call, output, note]
    assert_only_the_new(turns)


def assert_only_the_new(turns: list[Turn], *, new_max: int = 300) -> None:
    """Each turn finds all of the prompt before it."""
    assert turns[0].prompt > 1500
    for before, turn in itertools.pairwise(turns):
        assert turn.cached >= before.prompt, turns
        assert turn.prompt - turn.cached < new_max, turns


def ask_claude(
    front: Front, messages: list[dict[str, Any]], number: int, *, more_tools: Sequence[dict[str, Any]] = ()
) -> Turn:
    """One turn; the counts are those of message_start, where the client looks first."""
    body = claude_request(messages, number, size=2500, max_tokens=SAID_TOKENS, temperature=0)
    body["tools"] += more_tools
    found = events(post(front, "/v1/messages?beta=true", body).body)
    usage = found[0]["message"]["usage"]
    assert found[-2]["usage"]["cache_read_input_tokens"] == usage["cache_read_input_tokens"]
    assert found[-2]["usage"]["output_tokens"] == SAID_TOKENS
    cached = usage["cache_read_input_tokens"]
    said = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
    return Turn(usage["input_tokens"] + cached, cached, said)


def answered(number: int, said: str, content: object = None) -> list[dict[str, Any]]:
    """What a turn adds: the model's words and a call, its result, and what the client tells the model by the way."""
    call = {"type": "tool_use", "id": f"t{number}", "name": "Tool1", "input": {"field_0": f"x{number}"}}
    result = {
        "type": "tool_result",
        "tool_use_id": f"t{number}",
        "content": content or [{"type": "text", "text": f"r{number}"}],
    }
    left = f"<total_tokens>{100_000 - 500 * number:08d} tokens left</total_tokens>"
    return [
        {"role": "assistant", "content": [{"type": "text", "text": said}, call]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": left},
        {"role": "system", "content": f"Plan mode is {'on' if number % 2 else 'off'}."},
    ]


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 150, "messages": [{"role": "user", "content": "x"}]},
            "message_stop",
        ),
        pytest.param(
            "/v1/responses",
            {"model": "fake", "max_output_tokens": 150, "input": "x"},
            "response.incomplete",
            marks=pytest.mark.process,
        ),
    ],
)
def test_a_worker_that_dies_in_mid_stream_is_not_noticed(path: str, body: dict[str, Any], last: str) -> None:
    """The stream pauses, goes on with the next token, and ends with every event in its place."""
    config = FakeEngineConfig(step_ms=5)
    with (
        WorkerProcess(config) as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT_S)
        connection.request("POST", path, json.dumps(body | {"stream": True, "temperature": 0}))
        response = connection.getresponse()
        data = response.read(2000)
        worker.kill_engine()
        data += response.read()
        connection.close()
    found = events(data)
    assert types(data)[-1] == last
    final = found[-2]["usage"] if path == "/v1/messages" else found[-1]["response"]["usage"]
    assert final["output_tokens"] == 150
