"""The official client, sync and async, whose own types check every response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.http.front import Front, serving, wait_until
from tests.http.scripted import ScriptedClient
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

KEY = "a-key-for-tests"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    with serving(HttpConfig(workers=(worker.address,), api_keys=(KEY, "another-key"))) as front:
        yield front


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def strict(document: openai.BaseModel) -> None:
    """Validate against the client's own type, which by itself it does not."""
    type(document).model_validate(document.model_dump(), strict=True)
    unknown = set(document.model_extra or ())
    assert not unknown, unknown


def test_a_chat(client: openai.OpenAI) -> None:
    """The whole response is of the type that the client declares."""
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, seed=1)
    assert isinstance(answer, ChatCompletion)
    strict(answer)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens == 5
    assert answer._request_id


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    """Every chunk is of its type, and together they are the answer."""
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=9, seed=1)
    stream = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=9,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        assert isinstance(chunk, ChatCompletionChunk)
        strict(chunk)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_a_prediction(client: openai.OpenAI) -> None:
    """The answer is the same, and says how much of it was foretold: of one letter nine times, where it stands."""
    for seed in range(200):
        asked: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 9, "seed": seed}
        plain = client.chat.completions.create(**asked, logprobs=True)
        assert plain.choices[0].logprobs
        tokens = [entry.token for entry in plain.choices[0].logprobs.content or []]
        letters = [token for token in tokens if len(token) == 1 and token.isascii() and token.isalpha()]
        if letters:
            break
    expected = letters[0] * 9
    for content in (expected, [{"type": "text", "text": expected}]):
        prediction: Any = {"type": "content", "content": content}
        answer = client.chat.completions.create(**asked, prediction=prediction)
        strict(answer)
        assert answer.choices[0].message.content == plain.choices[0].message.content
        assert answer.usage
        details = answer.usage.completion_tokens_details
        assert details
        assert details.accepted_prediction_tokens == tokens.count(letters[0])
        assert details.rejected_prediction_tokens == 9 - tokens.count(letters[0])


def test_drafts_behind_a_stop_string_are_not_counted() -> None:
    """The worker has made more tokens by then; clients take accepted tokens for a part of the output."""
    scripted = ScriptedClient(lambda prompt: "one STOP two")
    scripted.drafts = {"ngram": (12, 10), "grammar": (2, 2)}
    with (
        serving(HttpConfig(), lambda *_: scripted) as front,  # type: ignore[arg-type]
        openai.OpenAI(base_url=front.url + "/v1", api_key="none", timeout=60) as client,
    ):
        answer = client.chat.completions.create(model="scripted", messages=MESSAGES, stop="STOP")
    assert answer.usage
    assert answer.usage.completion_tokens_details
    details = answer.usage.completion_tokens_details
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("one ", 8)
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 2)


def test_completions(client: openai.OpenAI) -> None:
    """Prompts as text and as tokens, streamed and not."""
    whole = client.completions.create(model="fake", prompt=[1, 2], max_tokens=5, seed=1, logprobs=2)
    assert isinstance(whole, Completion)
    strict(whole)
    chunks = list(client.completions.create(model="fake", prompt=[1, 2], max_tokens=5, seed=1, stream=True))
    for chunk in chunks:
        # The API sends null until the end here, which the client's type leaves out.
        chunk.choices[0].finish_reason = chunk.choices[0].finish_reason or "stop"
        strict(chunk)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    several = client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echoed_prompt_has_logprobs(client: openai.OpenAI, max_tokens: int) -> None:
    """As lm-evaluation-harness asks for them: all tokens but the first. A stop string in the prompt stops nothing."""
    asked: Any = {
        "model": "fake", "seed": 1, "logprobs": 2, "echo": True, "max_tokens": max_tokens, "stop": ["ha"],
    }  # fmt: skip
    prompts = ["What now", "Well"]
    whole = client.completions.create(prompt=prompts, **asked)
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs
        tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
        best = choice.logprobs.top_logprobs or []
        assert tokens[: len(prompt)] == list(prompt)
        assert len(tokens) == len(logprobs) == len(best) == len(prompt) + max_tokens
        assert logprobs[0] is best[0] is None
        assert all(logprob < 0 for logprob in logprobs[1:])
        assert (choice.logprobs.text_offset or [])[: len(prompt)] == list(range(len(prompt)))
        assert choice.finish_reason == "length"
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (12, 2 * max_tokens)
    stream = client.completions.create(prompt=prompts[0], stream=True, **asked)
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    parts = [part for chunk in chunks if chunk.logprobs for part in chunk.logprobs.token_logprobs or []]
    assert whole.choices[0].logprobs
    assert parts == whole.choices[0].logprobs.token_logprobs


def test_logprobs(client: openai.OpenAI) -> None:
    """One entry for each token, with its alternatives."""
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
    )
    strict(answer)
    assert answer.choices[0].logprobs
    assert answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [3] * 4


def test_models(client: openai.OpenAI) -> None:
    """The list and each card are of their types."""
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id == "fake"


def test_errors_are_the_clients_own(client: openai.OpenAI, front: Front) -> None:
    """Each status is the exception it stands for, and the field at fault is named."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-99", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="fake", messages=MESSAGES, extra_body={"colour": "red"})
    assert unknown.value.param == "colour"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="fake", messages=cast(Any, [{"role": "user", "content": "x" * 5000}])
        )
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=front.url + "/v1", api_key="wrong-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_helper_for_streams_builds_the_same_answer(client: openai.OpenAI) -> None:
    """`chat.completions.stream` accumulates our chunks into a whole response."""
    with client.chat.completions.stream(model="fake", messages=MESSAGES, seed=2) as stream:
        for _ in stream:
            pass
        built = stream.get_final_completion()
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, seed=2)
    assert built.choices[0].message.content == whole.choices[0].message.content


def test_leaving_a_stream_aborts_it(client: openai.OpenAI, front: Front) -> None:
    """The request is gone from the front-end soon after the client has closed the response."""
    worker = front.service.pool.workers[0]
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert worker.running == 1
    stream.close()
    wait_until(lambda: worker.running == 0, "the request is aborted")


def test_many_at_once_with_the_async_client(front: Front) -> None:
    """Twenty streams of one client, each whole and of its own."""

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=12, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_() -> list[str]:
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key=KEY, timeout=60) as client:
            return await asyncio.gather(*[one(client, seed % 10) for seed in range(20)])

    texts = asyncio.run(all_())
    assert texts[:10] == texts[10:]
    assert len(set(texts)) == 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_round_trip(stream: bool) -> None:
    """The model calls, the program answers, the model says the result; the client's objects go back as they came."""

    def say(prompt: str) -> str:
        if "tool: 3" in prompt:
            return "It is 3."
        return 'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    scripted = ScriptedClient(say, facts={"tool_parser": "json_tools"})
    with (
        serving(HttpConfig(), lambda *_: scripted) as front,  # type: ignore[arg-type]
        openai.OpenAI(base_url=front.url + "/v1", api_key="none", timeout=60) as client,
    ):
        messages: Any = [{"role": "user", "content": "1 + 2?"}]
        if stream:
            with client.chat.completions.stream(model="scripted", messages=messages, tools=TOOLS) as events:
                for _ in events:
                    pass
                choice = cast("Any", events.get_final_completion().choices[0])
        else:
            answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
            strict(answer)
            choice = cast("Any", answer.choices[0])
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        sent_back = choice.message.model_dump() if stream else choice.message
        if isinstance(sent_back, dict):
            # The stream helper adds what it parsed; a program sends what the API defines.
            sent_back = {key: sent_back[key] for key in ("role", "content", "tool_calls", "refusal")}
            for made in sent_back["tool_calls"]:
                made["function"].pop("parsed_arguments", None)
        messages += [sent_back, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        final = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
        assert final.choices[0].message.content == "It is 3."
        assert final.choices[0].finish_reason == "stop"
