"""openai-python's tool loop against a real worker on the bundled model: asks and tools that no training held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.front import Front, serving
from tests.support.workers import WorkerProcess
from tools.pico.chat import Turn
from tools.pico.draw import Draw
from tools.pico.tools.chat import Offer, call_turn, offers
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

ASKS = 10
# The bundled model is small: of the asks of this test it may fail some.
RIGHT_LEAST = 8


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """The official client, of a front-end of a worker on pico-tools."""
    with (
        WorkerProcess(None, model="pico-tools") as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
        openai.OpenAI(base_url=url(front), api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def url(front: Front) -> str:
    """Where the client looks for the API."""
    return front.url + "/v1"


def asks() -> list[tuple[list[Offer], Turn]]:
    """Held-out tools, and a held-out ask for each."""
    draw = Draw(21, "held_out")
    made = []
    for _ in range(ASKS):
        offered = offers(draw, 1)
        made.append((offered, call_turn(draw, draw.one(offered))))
    return made


def answer(client: openai.OpenAI, messages: list[Any], tools: Any, *, stream: bool) -> Any:
    """The message that comes next, whole or put together from the chunks of a stream."""
    if not stream:
        completion = client.chat.completions.create(
            model="pico-tools", messages=messages, tools=tools, temperature=0
        )
        return completion.choices[0]
    with client.chat.completions.stream(
        model="pico-tools", messages=messages, tools=tools, temperature=0
    ) as events:
        return events.get_final_completion().choices[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_calls_the_tool_and_tells_its_answer(client: openai.OpenAI, stream: bool) -> None:
    """The right function with the right arguments, and what it answered, for most held-out asks."""
    right = told = 0
    for offered, turn in asks():
        assert turn.call
        tools = [offer.tool.definition for offer in offered]
        messages: list[Any] = [{"role": "user", "content": turn.user}]
        choice = answer(client, messages, tools, stream=stream)
        calls = choice.message.tool_calls or []
        if [(call.function.name, json.loads(call.function.arguments)) for call in calls] != [
            (turn.call.name, json.loads(turn.call.arguments))
        ]:
            continue
        right += 1
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": turn.call.answer})
        last = answer(client, messages, tools, stream=stream)
        assert not last.message.tool_calls
        told += turn.fact in (last.message.content or "")
    assert right >= RIGHT_LEAST
    assert told >= RIGHT_LEAST - 1


def test_without_tools_nothing_is_called(client: openai.OpenAI) -> None:
    """The same model answers a sum that it knows by itself."""
    choice = answer(client, [{"role": "user", "content": "What is 3 + 4?"}], openai.NOT_GIVEN, stream=False)
    assert choice.message.content == "3 + 4 = 7."
    assert not choice.message.tool_calls
