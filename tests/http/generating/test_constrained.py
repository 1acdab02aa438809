"""Constrained output over HTTP, with the official client, on the bundled model with a template that knows tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.http.front import serving
from tests.http.tool_directory import MOOD, tool_directory
from tests.support.workers import WorkerProcess
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

MESSAGES: Any = [{"role": "user", "content": "Tell me about Tom."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["c", "f"]}},
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
NOT: dict[str, Any] = {"not": {}}


class Person(BaseModel):
    name: str
    mood: Literal["glad", "sad"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tool_directory(tmp_path_factory.mktemp("models"))
    with WorkerProcess(None, model=str(directory)) as worker:
        with worker.client() as native:
            native.wait_ready()
        with (
            serving(HttpConfig(workers=(worker.address,))) as front,
            openai.OpenAI(base_url=front.url + "/v1", api_key="-", max_retries=0, timeout=60) as client,
        ):
            yield client


def test_parse_gives_the_object(client: openai.OpenAI) -> None:
    """`.parse` with a pydantic model: the schema that the client makes of it is enforced."""
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="tools", messages=MESSAGES, response_format=Person, seed=seed, max_tokens=300, temperature=0.9,
            frequency_penalty=1.0,
        )  # fmt: skip
        if answer.choices[0].finish_reason == "stop":
            person = answer.choices[0].message.parsed
            assert person is not None
            assert person.mood in ("glad", "sad")
            return
    raise AssertionError("no answer of five ended by itself")


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    """What does not fit max_tokens is the beginning of JSON, with finish_reason length."""
    answer = client.chat.completions.create(
        model="tools", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_an_answer_that_a_stop_string_cuts_says_so(client: openai.OpenAI) -> None:
    """The string is told, and the reason is not that of a whole answer."""
    answer = client.chat.completions.create(
        model="tools", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=50, stop=["{"]
    )
    choice: Any = answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason, choice.message.content) == ("length", "{", "")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_can_be_forced(client: openai.OpenAI, stream: bool) -> None:
    """Named, or any of those there are; arguments follow their schema, references included."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice, names in ((named, {"get_weather"}), ("required", {"get_weather", "get_time"})):
        asked: Any = {
            "model": "tools", "messages": MESSAGES, "tools": [WEATHER, TIME], "tool_choice": choice,
            "parallel_tool_calls": False, "max_tokens": 200, "seed": 3, "temperature": 0.9,
        }  # fmt: skip
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert set(arguments) == {"city", "unit"}
            assert arguments["unit"] in ("c", "f")


def test_a_format_begins_where_the_reasoning_ends(client: openai.OpenAI) -> None:
    """What is thought is free. The bias makes the model end it; what follows allows no such mark."""
    answer = client.chat.completions.create(
        model="tools", messages=MESSAGES, max_tokens=300, temperature=0.9, seed=2, logit_bias={"1279": 9},
        response_format={"type": "json_schema", "json_schema": {"strict": True, "name": "x", "schema": MOOD}},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )  # fmt: skip
    message: Any = answer.choices[0].message
    assert answer.choices[0].finish_reason == "stop"
    assert message.reasoning_content
    assert json.loads(message.content)["mood"] in ("glad", "sad")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_grammar": 'start: "a" "b" "c"?'}, "abc?"),
        ({"structured_outputs": {"choice": ["up"]}}, "up"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[0-9]{2}"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_vllms_fields_are_taken(client: openai.OpenAI, asked: Any, pattern: str) -> None:
    """In chats and in completions."""
    chat = client.chat.completions.create(model="tools", messages=MESSAGES, max_tokens=50, extra_body=asked)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = client.completions.create(model="tools", prompt="Once", max_tokens=50, extra_body=asked)
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "name": "x", "schema": NOT}}},
            '"not"',
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"extra_body": {"guided_regex": "(a"}}, "unclosed"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "one of"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "nobody"),
        ({"tool_choice": "required"}, "no tools"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_cannot_be_enforced_is_a_400_that_names_it(
    client: openai.OpenAI, asked: Any, named: str
) -> None:
    """Whether the front-end or the worker finds it."""
    with pytest.raises(openai.BadRequestError, match=re.escape(named)):
        client.chat.completions.create(model="tools", messages=MESSAGES, max_tokens=20, **asked)


def test_a_schema_that_nobody_insists_on_is_enforced_as_far_as_it_can_be(client: openai.OpenAI) -> None:
    """Without `strict`, keywords that a grammar cannot have are passed over."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    answer = client.chat.completions.with_raw_response.create(
        model="tools", messages=MESSAGES, max_tokens=50,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert set(json.loads(answer.parse().choices[0].message.content or "")) <= {1, 2}
    assert answer.headers["x-unenforced-keywords"] == "uniqueItems"


def test_messages_and_responses_are_held_to_the_same(client: openai.OpenAI) -> None:
    """A forced tool and a schema, in the words of either API."""
    # It takes seconds, and of the processes of a run only this one needs it.
    import anthropic

    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    schema = {**Person.model_json_schema(), "additionalProperties": False}
    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as claude:
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            message = claude.messages.create(  # type: ignore[call-overload]
                model="tools", max_tokens=300, messages=MESSAGES, tools=[tool], tool_choice=choice,  # type: ignore[list-item, arg-type]
                    extra_body={"temperature": 0},
            )  # fmt: skip
            assert message.stop_reason == "tool_use"
            (call,) = message.content
            assert call.type == "tool_use"
            assert call.input["unit"] in ("c", "f")
        said = claude.messages.create(
            model="tools", max_tokens=300, messages=MESSAGES, extra_body={"temperature": 0},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )  # fmt: skip
    Person.model_validate_json(said.content[0].text)  # type: ignore[union-attr]
    parsed = client.responses.parse(
        model="tools", input="Tell me about Tom.", text_format=Person, max_output_tokens=300, temperature=0
    )
    assert parsed.output_parsed is not None
    strict = {**tool, "strict": True, "input_schema": {"type": "object", "not": {}}}
    with (
        anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as claude,
        pytest.raises(anthropic.BadRequestError, match="not"),
    ):
        claude.messages.create(model="tools", max_tokens=9, messages=MESSAGES, tools=[strict])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="not"):
        client.responses.create(
            model="tools", input="Tell me.",
            tools=[{"type": "function", "name": "f", "strict": True, "parameters": strict["input_schema"]}],
        )  # fmt: skip
    forced = client.responses.create(  # type: ignore[call-overload]
        model="tools", input="Tell me.", tools=[{"type": "function", **function}], tool_choice="required",
        max_output_tokens=300, temperature=0,
    )  # fmt: skip
    assert json.loads(forced.output[-1].arguments)["unit"] in ("c", "f")  # type: ignore[union-attr]
