"""A bound on reasoning by the field of each API: held by a real model, refused or named where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, Reply, post, serving
from tests.http.scripted import ScriptedFront
from tests.http.tool_directory import MOOD, tool_directory
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE
from zmqengine.testing import FakeWorker
from zmqengine_client import Client, errors
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http import HttpConfig

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
USER: Any = [{"role": "user", "content": "Tell me about Tom."}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """The bundled model with marks of reasoning, which its template opens where it is told to."""
    with WorkerProcess(None, model=str(tool_directory(tmp_path_factory.mktemp("models")))) as worker:
        with worker.client() as native:
            native.wait_ready()
        yield worker


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with serving(HttpConfig(workers=(worker.address,))) as front:
        yield front


@pytest.fixture(scope="module")
def tokenizer(worker: WorkerProcess) -> Tokenizer:
    with worker.client() as client:
        return client.tokenizer()


def reasoned(reply: Reply) -> tuple[str, str, int | None]:
    """Reasoning and answer of a reply of any of the APIs, and the tokens of reasoning in its usage."""
    assert reply.status == 200, reply.body
    document = reply.json
    usage = document.get("usage", {})
    if "choices" in document:
        message = document["choices"][0]["message"]
        details = usage["completion_tokens_details"]
        return message["reasoning_content"], message["content"], details["reasoning_tokens"]
    if "output" in document:
        thought, answer = document["output"]
        said = thought["content"][0]["text"], answer["content"][0]["text"]
        return *said, usage["output_tokens_details"]["reasoning_tokens"]
    if "message" in document:
        return document["message"]["thinking"], document["message"]["content"], None
    thought, answer = document["content"]
    return thought["thinking"], answer["text"], usage["output_tokens_details"]["thinking_tokens"]


OF_CHAT: list[dict[str, Any]] = [
    {"thinking_max": 12, **THINKS},
    {"thinking_token_budget": 12, **THINKS},
    {"thinking_budget": 12.0, **THINKS},
    {"reasoning_budget": 12, **THINKS},
    {"thinking": {"type": "enabled", "budget_tokens": 12}},
    {"reasoning": {"max_tokens": 12}},
    {"think": 12},
]
BUDGET = {"type": "enabled", "budget_tokens": 12}
OF_MESSAGES = {"model": "tools", "messages": USER, "max_tokens": 60, "thinking": BUDGET}
OF_RESPONSES = {"input": USER[0]["content"], "max_output_tokens": 60, "reasoning": {"max_tokens": 12}}
OF_OLLAMA = {"model": "tools", "messages": USER, "stream": False}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, OF_MESSAGES),
    (RESPONSES, OF_RESPONSES),
    (OLLAMA, {**OF_OLLAMA, "think": 12, "options": {"num_predict": 60}}),
    (OLLAMA, {**OF_OLLAMA, "think": True, "options": {"num_predict": 60, "thinking_budget": 12}}),
]
ASKED = [(CHAT, {"messages": USER, "max_tokens": 60, **fields}) for fields in OF_CHAT] + OTHERS


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: str(value)[-60:])
def test_each_api_bounds_the_reasoning(
    front: Front, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    """After 12 tokens the model closes its reasoning, and answers with the rest; the usage counts the closer too."""
    reasoning, answer, told = reasoned(post(front, path, body))
    assert len(tokenizer.encode(reasoning, add_special_tokens=False)) == 12
    assert answer.strip()
    assert told in (None, 13)


@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_the_bound_is_exact_in_every_choice_and_in_a_stream(front: Front, tokens: int) -> None:
    """Choices of one request, seeded; a stream has the same text."""
    body = {
        "messages": USER,
        "max_tokens": 60,
        "thinking_max": tokens,
        "temperature": 0.9,
        "seed": 4,
        **THINKS,
    }
    reply = post(front, CHAT, {**body, "n": 3})
    choices = [choice["message"] for choice in reply.json["choices"]]
    details = reply.json["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 3 * (tokens + 1)
    assert len({message["content"] for message in choices}) == 3
    events = post(front, CHAT, {**body, "stream": True}).events
    for field in ("reasoning_content", "content"):
        deltas = (event["choices"][0]["delta"].get(field) or "" for event in events)
        assert "".join(deltas) == (choices[0].get(field) or "")


def test_a_format_begins_behind_the_forced_closer(front: Front) -> None:
    """The answer is JSON of the schema, however short the reasoning was cut."""
    schema = {"type": "json_schema", "json_schema": {"strict": True, "name": "x", "schema": MOOD}}
    for tokens in (0, 5, 20):
        body = {
            "messages": USER,
            "max_tokens": 300,
            "thinking_max": tokens,
            "response_format": schema,
            **THINKS,
        }
        reply = post(front, CHAT, body).json
        assert json.loads(reply["choices"][0]["message"]["content"])["mood"] in ("glad", "sad")
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == tokens + 1


def test_a_value_that_is_no_number_of_tokens_is_refused_by_the_name_that_was_sent(front: Front) -> None:
    """And two names with two values; -1 is no bound, as in vLLM and llama.cpp."""
    for fields, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_budget": "many"}, "thinking_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
        ({"thinking_max": 3, "thinking_budget": 4}, "thinking_budget"),
    ):
        reply = post(front, CHAT, {"messages": USER, **fields})
        assert (reply.status, reply.error["param"]) == (400, param), fields
    reply = post(front, MESSAGES, {**OF_MESSAGES, "thinking": {"type": "enabled", "budget_tokens": -1}})
    assert reply.status == 400
    assert "budget_tokens" in reply.json["error"]["message"]
    free = {"messages": USER, "max_tokens": 20, "temperature": 0, **THINKS}
    plain = post(front, CHAT, free).json["choices"][0]["message"]["reasoning_content"]
    reply = post(front, CHAT, {**free, "reasoning_budget": -1})
    assert reply.json["choices"][0]["message"]["reasoning_content"] == plain
    reply = post(front, CHAT, {**free, "thinking": {"type": "disabled", "budget_tokens": 2}})
    assert "reasoning_content" not in reply.json["choices"][0]["message"]


def test_the_python_client_takes_a_number_of_tokens(worker: WorkerProcess) -> None:
    """Beside messages and texts; beside token ids the markers have to come with it."""
    closer = "</think>"
    with worker.client() as client:
        plain = client.chat(USER, chat_template_kwargs={"enable_thinking": True}, max_tokens=40)
        free = plain.read()
        bounded = client.chat(
            USER, chat_template_kwargs={"enable_thinking": True}, max_tokens=40, thinking_max=9
        )
        tokens = bounded.read().tokens
        assert (free.text, bool(free.reasoning)) == ("", True)
        assert client.tokenizer().decode(tokens[9:10]) == closer
        assert tokens[:9] == free.tokens[:9]
        assert free.reasoning.startswith(bounded.result.reasoning)
        assert bounded.result.text
        assert closer not in bounded.result.text
        written = client.generate("Tom\n<think>Well", max_tokens=20, thinking_max=3)
        assert written.text()
        assert written.result.tokens[3] == tokens[9]
        # Nothing opens it, and the model does not.
        unopened = client.generate("Tom", max_tokens=20, thinking_max=3)
        assert closer not in unopened.text()
        with pytest.raises(errors.BadRequest, match="ThinkingMax"):
            list(client.generate_tokens([5, 6], max_tokens=5, thinking_max=3))
        with pytest.raises(errors.BadRequest, match="thinking_max"):
            client.chat(USER, max_tokens=5, thinking_max=-1).text()


# --- what a scripted model says: openers of its own, channels, other workers ---


MARKS = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
CHANNELS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant{# <|channel|><|message|> #}"


def test_reasoning_that_the_model_opens_is_bounded_too() -> None:
    """In every API, with the opener as the first of the output."""
    with ScriptedFront(
        "{# <think> </think> #}" + CHAT_TEMPLATE, text=f"<think>{WORDS}</think>Answer", special=MARKS
    ) as model:
        reasoning, answer, told = reasoned(model.chat(messages=USER, thinking_max=3))
        assert (answer, told) == ("Answer", 5)
        assert 0 < len(reasoning) < len(WORDS)
        bound = model.client.options[-1]["thinking_max"]
        assert (bound.tokens, bound.opened, bound.repeats) == (3, False, False)  # type: ignore[attr-defined]
        for path, body in OTHERS:
            assert reasoned(post(model.front, path, {**body, "model": "scripted"}))[1] == "Answer", path
            assert model.client.options[-1]["thinking_max"].tokens == 12  # type: ignore[attr-defined]


def test_the_analysis_of_harmony_ends_and_the_final_channel_begins() -> None:
    """The closer ends the message; then the head of the answer, or with tools that of a message to anybody."""
    said = f"<|channel|>analysis<|message|>{WORDS}<|end|><|start|>assistant<|channel|>final<|message|>Answer<|return|>"
    with ScriptedFront(CHANNELS, text=said, special=HARMONY) as model:
        encode = model.client._tokenizer.encode
        model.client.say = lambda prompt: said.replace("<|start|>assistant<|channel|>final<|message|>", "")
        reply = model.chat(messages=USER, thinking_max=4)
        message = reply.json["choices"][0]["message"]
        assert message["content"] == "Answer"
        assert 0 < len(message["reasoning_content"]) < len(WORDS)
        bound: Any = model.client.options[-1]["thinking_max"]
        assert bound.closer == encode("<|end|>", add_special_tokens=False)
        assert bound.then == encode("<|start|>assistant<|channel|>final<|message|>", add_special_tokens=False)
        assert bound.repeats
        assert not bound.opened
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        assert model.chat(messages=USER, thinking_max=4, tools=[tool]).status == 200
        bound = model.client.options[-1]["thinking_max"]
        assert bound.then == encode("<|start|>assistant<|channel|>", add_special_tokens=False)


@pytest.mark.parametrize("words", [3, 200])
def test_an_analysis_that_the_output_continues_is_open(words: int) -> None:
    """However long it is; a final message that is continued is not."""
    with ScriptedFront(CHANNELS, text="more<|return|>", special=HARMONY) as model:
        for turn, opened in (
            ({"reasoning_content": "hm " * words, "content": ""}, True),
            ({"content": "So"}, False),
        ):
            last = {"role": "assistant", **turn}
            post(model.front, CHAT, {"messages": [*USER, last], "thinking_max": 4})
            bound: Any = model.client.options[-1]["thinking_max"]
            assert bound.opened == opened


def test_a_model_without_reasoning_and_an_older_worker_say_so() -> None:
    """The one has nothing to bound, which a header says; the other could not, and refuses by the client's name."""
    with ScriptedFront(CHAT_TEMPLATE, text="Answer") as model:
        reply = model.chat(messages=USER, thinking_budget=5)
        assert reply.json["choices"][0]["message"]["content"] == "Answer"
        assert reply.headers["x-ignored-fields"] == "thinking_max"
        assert model.client.options[-1]["thinking_max"] is None
    older = ScriptedFront("{# <think> </think> #}" + CHAT_TEMPLATE, text="Answer", special=MARKS)
    older.client.bounds_thinking = False
    with older as model:
        reply = model.chat(messages=USER, thinking_max=5)
        assert (reply.status, reply.error["param"]) == (400, "thinking_max")
        reply = post(model.front, MESSAGES, {**OF_MESSAGES, "model": "scripted"})
        assert reply.status == 400
        assert "thinking.budget_tokens" in reply.json["error"]["message"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 9}, {"type": "adaptive"}])
def test_thinking_of_messages_reaches_a_template_that_waits_for_it(thinking: dict[str, Any]) -> None:
    """As in the other APIs; without the field the template is told that there is none."""
    template = (
        "{% if enable_thinking is defined and enable_thinking %}on{% else %}off{% endif %}" + CHAT_TEMPLATE
    )
    body = {"model": "scripted", "messages": USER, "max_tokens": 50}
    with ScriptedFront(template, text="Answer") as model:
        for fields, wanted in (({"thinking": thinking}, "on"), ({}, "off")):
            assert post(model.front, MESSAGES, {**body, **fields}).status == 200
            assert model.client.prompts[-1].startswith(wanted)


def test_a_template_that_tells_the_model_its_budget_gets_it() -> None:
    """Seed-OSS's, by the name that it has there."""
    with ScriptedFront(
        "{{ thinking_budget }}<seed:think></seed:think>" + CHAT_TEMPLATE, text="Answer"
    ) as model:
        model.chat(messages=USER, thinking_token_budget=512)
        assert model.client.prompts[-1].startswith("512")


def test_a_client_says_that_a_model_has_no_reasoning_that_is_known() -> None:
    """By the option's name, before anything is sent."""
    with FakeWorker(FakeEngineConfig()) as worker, Client(worker.address) as client:
        stream = client.generate("a", max_tokens=5, thinking_max=3)
        with pytest.raises(errors.BadRequest, match="markers of reasoning"):
            stream.text()
