"""Messages and Responses as the official Python clients and their stream helpers read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest

from tests.http.agents.scripted_agent import COMMAND, FACTS, TEMPLATE, say
from tests.http.front import Front, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    import anthropic

KEY = "a-long-enough-key"
SHELL = {"name": "bash", "description": "Runs a command", "input_schema": {"type": "object"}}
SHELL_FUNCTION = {"type": "function", "name": "bash", "strict": False, "parameters": {"type": "object"}}
QUESTION = "use a tool"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    client = ScriptedClient(say, template=TEMPLATE, facts=FACTS)
    with serving(HttpConfig(api_keys=(KEY,)), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module")
def claude(front: Front) -> Iterator[anthropic.Anthropic]:
    # It takes seconds, and of the processes of a run only this one needs it.
    import anthropic

    with anthropic.Anthropic(base_url=front.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_anthropic_tool_loop(claude: anthropic.Anthropic) -> None:
    """A call, its result, the answer; the content goes back as it came, thinking and all."""
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": QUESTION}]
    first = claude.messages.create(  # type: ignore[call-overload]
        model="scripted", max_tokens=500, messages=messages, tools=[SHELL],  # type: ignore[list-item]
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert first.stop_reason == "tool_use"
    thinking, text, call = first.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert call.type == "tool_use"
    assert call.input["command"] == COMMAND
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]},
    ]
    last = claude.messages.create(model="scripted", max_tokens=500, messages=messages, tools=[SHELL])  # type: ignore[list-item]
    assert last.stop_reason == "end_turn"
    assert last.content[-1].text == "The tool said: 42"  # type: ignore[union-attr]


def test_anthropic_stream_helper(claude: anthropic.Anthropic) -> None:
    """It builds the whole message from the events, and hands out text and input as they come."""
    with claude.messages.stream(
        model="scripted", max_tokens=500, messages=[{"role": "user", "content": QUESTION}],
        tools=[SHELL],  # type: ignore[list-item]
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json", "message_stop"} <= kinds
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.usage.input_tokens > 0
    assert message.usage.cache_read_input_tokens is not None
    assert message.stop_reason == "tool_use"


def test_anthropic_beta_count_and_models(claude: anthropic.Anthropic) -> None:
    """The beta paths are the same; counts and lists parse."""
    beta = claude.beta.messages.create(
        model="scripted",
        max_tokens=50,
        messages=[{"role": "user", "content": "hi"}],
        betas=["brand-new-2027"],
    )
    counted = claude.messages.count_tokens(model="scripted", messages=[{"role": "user", "content": "hi"}])
    usage = beta.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert [model.id for model in claude.models.list()] == ["scripted"]
    assert claude.models.retrieve("scripted").display_name == "scripted"


def test_anthropic_errors_are_its_own(claude: anthropic.Anthropic, front: Front) -> None:
    """Status and type become the client's exceptions."""
    import anthropic

    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=messages)
    with pytest.raises(anthropic.BadRequestError, match="exceed context limit"):
        claude.messages.create(model="scripted", max_tokens=10_000, messages=messages)
    with (
        anthropic.Anthropic(base_url=front.url, auth_token="wrong-but-long-enough") as stranger,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        stranger.messages.create(model="scripted", max_tokens=5, messages=messages)
    assert refused.value.request_id


def test_openai_responses_tool_loop(gpt: openai.OpenAI) -> None:
    """The output goes back as input, as the client documents it."""
    conversation: list[object] = [{"role": "user", "content": QUESTION}]
    first = gpt.responses.create(model="scripted", input=conversation, tools=[SHELL_FUNCTION])  # type: ignore[arg-type, list-item, call-overload]
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    conversation.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"})
    last = gpt.responses.create(model="scripted", input=conversation, tools=[SHELL_FUNCTION])  # type: ignore[arg-type, list-item, call-overload]
    assert last.output_text == "The tool said: 42"
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    assert last.status == "completed"


def test_openai_responses_stream_helper(gpt: openai.OpenAI) -> None:
    """It holds every event against a snapshot of its own and raises for one that is missing."""
    with gpt.responses.stream(model="scripted", input=QUESTION, tools=[SHELL_FUNCTION]) as stream:  # type: ignore[list-item]
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "I look."
    call = final.output[-1]
    assert call.type == "function_call"
    assert call.name == "bash"


def test_openai_responses_cut_short(gpt: openai.OpenAI) -> None:
    """Incomplete, with the reason."""
    response = gpt.responses.create(model="scripted", input="hi", max_output_tokens=20)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
