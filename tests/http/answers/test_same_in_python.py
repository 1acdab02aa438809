"""The Python client's `chat` reads an answer as HTTP does: text, reasoning, calls, and the reason to finish."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.answers.conftest import CALL, TOOLS, Model
from tests.http.front import Front, chat, post
from tests.http.scripted import END_TOKEN
from zmqengine.protocol.messages import End, TokenRow
from zmqengine_client import Completion, Tokenizer
from zmqengine_client.core.chunks import TextChunk
from zmqengine_client.core.options import make_options
from zmqengine_client.core.request import Request
from zmqengine_client.text.prompts import chat_encoder, new_text_reader, set_text_prompt

MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWERS = {
    "a text": "Hello!",
    "a call": CALL,
    "a text and two calls": f"I add.\n{CALL}\n{CALL}",
    "reasoning": "<think>hm</think>yes",
    "reasoning and a call": f"<think>I call {CALL} now.</think>\n\nSo:{CALL}",
    "a malformed call": '<tool_call>{"name": add, "arguments": {"a": </tool_call> sorry',
    "a call that is cut": CALL.removesuffix('"\u00e9"}}</tool_call>'),
    "a call whose arguments break": '<tool_call>{"name": "add", "arguments": {"a": ]}}</tool_call> sorry',
    "a call of no offered function": '<tool_call>{"name": "sub", "arguments": {"a": 1}}</tool_call>',
}


def read_in_python(tokenizer: Tokenizer, text: str, stop: list[str], *, tools: Any, size: int) -> Completion:
    """The outcome of a chat whose model says `text`, in chunks of `size` tokens."""
    encode = chat_encoder(MESSAGES, tools, None)
    request = Request([], make_options({"max_tokens": 1000}))
    reader = new_text_reader(request, stop)
    set_text_prompt(request, reader, tokenizer, encode)
    assert not request.ended
    tokens = [*tokenizer.encode(text, add_special_tokens=False), END_TOKEN]
    chunks: list[TextChunk] = []
    for place in range(0, len(tokens), size):
        request.receive(TokenRow(request.id, place, tokens[place : place + size]))
        chunk = reader.take()
        chunks += [chunk] if chunk is not None else []
        if reader.finished:
            break
    else:
        request.end = End("stop", prompt_tokens=len(request.prompt))
        chunk = reader.take()
        chunks += [chunk] if chunk is not None else []
    assert reader.finished
    outcome = reader.completion()
    assert "".join(chunk.text for chunk in chunks) == outcome.text
    assert "".join(chunk.reasoning for chunk in chunks) == outcome.reasoning
    return outcome


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("stop", [[], ["yes"], ["b"]], ids=["", "stop in the text", "stop in a call"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("offered", [True, False], ids=["tools", "no tools"])
def test_an_answer_is_read_as_over_http(
    model: Model, front: Front, answer: str, stop: list[str], offered: bool, size: int
) -> None:
    """A call that is cut is shown over HTTP as far as it came; in Python it is none, as no program can run it."""
    model.text = ANSWERS[answer]
    tools = TOOLS if offered else None
    body = chat(**({"tools": TOOLS} if offered else {}), **({"stop": stop} if stop else {}))
    choice = post(front, "/v1/chat/completions", body).json["choices"][0]
    tokenizer = Tokenizer(model.client.bundle)
    outcome = read_in_python(tokenizer, model.text, stop, tools=tools, size=size)
    message, reason = choice["message"], choice["finish_reason"]
    assert outcome.text == (message.get("content") or "")
    assert outcome.reasoning == (message.get("reasoning_content") or "")
    assert outcome.finish == ("length" if reason == "length" else "stop")
    whole = [call["function"] for call in message.get("tool_calls", []) if is_json(call)]
    assert [(call.name, call.arguments) for call in outcome.tool_calls] == [
        (function["name"], json.loads(function["arguments"])) for function in whole
    ]
    assert len({call.id for call in outcome.tool_calls}) == len(outcome.tool_calls)


def is_json(call: dict[str, Any]) -> bool:
    """Whether the arguments of a call are whole."""
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return True


def test_the_output_of_a_schema_is_all_text(model: Model) -> None:
    """A constraint holds for the whole output, so there is no reasoning beside it, whatever it looks like."""
    tokenizer = Tokenizer(model.client.bundle)
    request = Request([], make_options({"regex": ".*"}))
    reader = new_text_reader(request, ())
    set_text_prompt(request, reader, tokenizer, chat_encoder(MESSAGES, None, None))
    tokens = tokenizer.encode("<think>hm</think>yes", add_special_tokens=False)
    request.receive(TokenRow(request.id, 0, tokens))
    request.end = End("stop", prompt_tokens=1)
    reader.take()
    assert reader.completion().text == "<think>hm</think>yes"


def test_an_answer_goes_into_the_next_prompt_as_over_http(model: Model, front: Front) -> None:
    """`outcome.turn` is the message that a client of OpenAI's API sends back."""
    model.text = f"So:{CALL}"
    tokenizer = Tokenizer(model.client.bundle)
    outcome = read_in_python(tokenizer, model.text, [], tools=TOOLS, size=5)
    (call,) = outcome.tool_calls
    history = [*MESSAGES, outcome.turn, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert post(front, "/v1/chat/completions", chat(tools=TOOLS, messages=history)).status == 200
    ids = chat_encoder(history, TOOLS, None).prompt(tokenizer).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == model.client.prompts[-1]
