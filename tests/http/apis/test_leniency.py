"""What clients send that OpenAI's own API would not take, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any, cast

import pytest
from msgspec import Meta, Struct

from tests.http.front import call, chat, get, post
from tests.http.scripted import THINKING_SWITCH, USER, ScriptedFront
from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE
from zmqengine_http.generating.generation import fitting_max_tokens
from zmqengine_http.serving.body import Body, ignored, refused
from zmqengine_http.serving.errors import ApiError, ContextTooLong
from zmqengine_http.workers.worker import Model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def asked() -> Iterator[ScriptedFront]:
    with ScriptedFront() as asked:
        yield asked


def test_keys_of_other_servers_in_messages_and_tools_end_no_conversation(asked: ScriptedFront) -> None:
    """cache_control, reasoning of vLLM, extra_content of Gemini: they come back with the next request."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]},
        {**USER, "id": "msg-1"},
        {
            "role": "assistant", "content": "", "reasoning": "thought", "provider": {"a": 1},
            "tool_calls": [
                {
                    "id": "c", "type": "function", "extra_content": {"google": {"thought_signature": "x"}},
                    "function": {"name": "f", "arguments": "{}", "strict": False},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1", "is_error": False},
    ]  # fmt: skip
    tools = [{"type": "function", "cache_control": {}, "function": {"name": "f", "x-order": 1}}]
    assert asked.chat(messages=messages, tools=tools).status == 200


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NO_TEXT: list[dict[str, object]] = [{}, {"content": None}, {"content": []}, {"content": ""}]


@pytest.mark.parametrize("result", NO_TEXT)
def test_a_result_without_text_is_a_result(asked: ScriptedFront, result: dict[str, object]) -> None:
    """Tools return nothing, and programs say so in each of these ways, in every turn that follows."""
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", **result},
    ]
    assert asked.chat(messages=messages, tools=[TOOL]).status == 200
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", **result}]}
    body = {
        "model": "scripted",
        "max_tokens": 4,
        "messages": [USER, {"role": "assistant", "content": [used]}, answer],
    }
    assert post(asked.front, "/v1/messages", body).status == 200
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": result.get("content", "")},
    ]
    assert post(asked.front, "/v1/responses", {"input": [USER, *items]}).status == 200


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto"}, "auto"), ({"type": "none"}, "none"), ({"type": "required"}, "required"),
        ({"type": "any"}, "required"), ({"type": "function", "name": "f"}, NAMED),
        ({"type": "tool", "name": "f"}, NAMED),
    ],
)  # fmt: skip
def test_a_tool_choice_may_be_in_the_words_of_another_api(
    asked: ScriptedFront, choice: object, meant: object
) -> None:
    """Those of Messages and of Responses: proxies pass them on. A forced call is refused alike, as by this worker."""
    replies = [asked.chat(tools=[TOOL], tool_choice=each) for each in (choice, meant)]
    assert {reply.status for reply in replies} == {200 if meant in ("auto", "none") else 400}
    if replies[0].status == 200:
        assert asked.client.prompts[-1] == asked.client.prompts[-2]
        assert ('"f"' in asked.client.prompts[-1]) == (meant == "auto")
    else:
        assert replies[0].error == replies[1].error


def test_arguments_of_a_call_may_be_an_object() -> None:
    """mlx-lm's own tests send them so; the template gets the same as from text."""
    with ScriptedFront("{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}") as asked:
        for arguments in ({"a": 1}, '{"a": 1}'):
            calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
            assert asked.chat(messages=[{"role": "assistant", "tool_calls": calls}]).status == 200
        assert asked.client.prompts[0] == asked.client.prompts[1]
        assert '{"a": 1}' in asked.client.prompts[0]


def test_a_reasoning_by_either_name_reaches_the_template() -> None:
    """reasoning_content is DeepSeek's name, reasoning vLLM's."""
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}|{{ m.content }}{% endfor %}"
    with ScriptedFront(template) as asked:
        for name in ("reasoning", "reasoning_content"):
            answer = {"role": "assistant", "content": "b", name: "thought"}
            asked.chat(messages=[USER, answer, USER])
        assert asked.client.prompts[0] == asked.client.prompts[1]
        assert "thought|b" in asked.client.prompts[0]


def test_unknown_fields_are_refused_or_ignored_by_name() -> None:
    """mlx-lm's, llama.cpp's and vLLM's own; the header tells which were not looked at."""
    body: dict[str, object] = {"repetition_context_size": 20, "xtc_probability": 0.1, "bad name\n": 1}
    with ScriptedFront(unknown_fields="ignore") as asked:
        reply = asked.chat(**body)
        assert reply.status == 200
        assert reply.headers["x-ignored-fields"] == "repetition_context_size, xtc_probability"
        assert "x-ignored-fields" not in asked.chat().headers
        assert asked.chat(guided_regex="a").status == 400
    with ScriptedFront() as asked:
        assert asked.chat(**body).error["param"] == "repetition_context_size"


@pytest.mark.parametrize("text", [r"a\ud83d", r"\ude00b", r"\ud83d\ud83d\ude00", r"\\ud83d \uD83D"])
def test_half_a_surrogate_pair_becomes_the_replacement_character(asked: ScriptedFront, text: str) -> None:
    """JavaScript makes it by cutting a string in an emoji; refused, it stays in the conversation for ever."""
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text.encode()
    reply = call(asked.front, "POST", CHAT, body)
    assert reply.status == 200, reply.body
    expected = json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "\ufffd" in expected
    assert expected in asked.client.prompts[-1]


def test_small_things_are_taken(asked: ScriptedFront) -> None:
    """A mark at the start of the body, whole numbers with a point, stops that are empty, no logprobs at all."""
    assert call(asked.front, "POST", CHAT, b"\xef\xbb\xbf" + json.dumps(chat()).encode()).status == 200
    for fields in (
        {"max_tokens": 2.0, "seed": 1.0, "n": 1.0},
        {"stop": ""},
        {"stop": ["", "x"]},
        {"top_logprobs": 0},
    ):
        assert asked.chat(**fields).status == 200, fields
    assert asked.chat(max_tokens=2.5).error["param"] == "max_tokens"
    assert [card["id"] for card in get(asked.front, "/v1/models/").json["data"]] == ["scripted"]


def test_two_messages_of_the_user_are_merged_where_the_template_wants_it() -> None:
    """opencode's title request; a template that does not mind gets them as they are."""
    messages = [USER, {"role": "user", "content": "there"}, {"role": "assistant", "content": "A"}, USER]
    with ScriptedFront(ALTERNATING) as asked:
        assert asked.chat(messages=messages).status == 200
        assert asked.client.prompts == ["user: Hi\n\nthere;assistant: A;user: Hi;"]
        messages = [USER, *({"role": "assistant", "content": "A", "name": name} for name in "xy"), USER]
        refusal = asked.chat(messages=messages, continue_final_message=False)
        assert "roles must alternate" in refusal.error["message"]
        assert "number 2 of role assistant" in refusal.error["message"]
        messages = [{"role": "assistant", "content": "A"}]
        assert asked.chat(messages=messages, continue_final_message=False).status == 200
        assert asked.client.prompts[-1] == "user: ;assistant: A;"
    messages = [USER, {"role": "user", "content": "there"}]
    with ScriptedFront("{% for m in messages %}{{ m.content }};{% endfor %}") as asked:
        asked.chat(messages=messages)
        assert asked.client.prompts == ["Hi;there;"]


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (THINKING_SWITCH + CHAT_TEMPLATE, {"none": "off", "low": "on", "high": "on", "xhigh": "on"}),
        (
            THINKING_SWITCH.replace("enable_thinking", "thinking") + CHAT_TEMPLATE,
            {"none": "off", "medium": "on"},
        ),
        ("{{ reasoning_effort }}" + CHAT_TEMPLATE, {"none": "none", "high": "high"}),
        ("thinking{{ messages[0].thinking }}" + CHAT_TEMPLATE, {"none": "thinking", "high": "thinking"}),
    ],
    ids=["enable_thinking", "thinking", "effort", "neither"],
)
def test_an_effort_is_said_in_the_words_of_the_template(template: str, efforts: dict[str, str]) -> None:
    """Agents send it to whatever they take for a reasoning model; where there is no word for it, it is taken."""
    with ScriptedFront(template) as asked:
        for effort, said in efforts.items():
            assert asked.chat(reasoning_effort=effort).status == 200
            assert asked.client.prompts[-1].startswith(said)


class Part(Struct, tag_field="type", tag="part"):
    x: int = 0


class Whole(Struct):
    count: int | None = None
    size: float | None = None
    share: int | float | None = None
    label: Annotated[int, Meta(ge=0)] | str | None = None
    parts: list[Part] = []


FIELDS = (refused("best_of", "use n", 1), refused("audio"), ignored("user", "for the caller's own records"))


@pytest.mark.parametrize(
    ("body", "not_looked_at", "inside"),
    [
        ({"count": 2.0, "size": 2, "best_of": 1, "audio": None, "user": {"a": 1}}, [], 0),
        ({"count": None, "colour": 1, "best_of": None}, ["colour"], 0),
        ({"parts": [{"type": "part", "x": 1}, {"type": "part", "y": 1, "z": 2}]}, [], 2),
    ],
)
def test_what_is_not_looked_at_is_told(body: dict[str, Any], not_looked_at: list[str], inside: int) -> None:
    """At the top by name, inside of others by number; neither a null nor a value that asks for nothing is refused."""
    for reader, ignore in ((Body(Whole, FIELDS, unknown_ignored=True), False), (Body(Whole, FIELDS), True)):
        read = reader.read(json.dumps(body).encode(), ignore_unknown=ignore)
        assert (read.ignored, read.unknown_inside) == (not_looked_at, inside)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"best_of": 2}, "best_of is not supported by this server: use n"),
        ({"best_of": True}, "best_of is not supported by this server: use n"),
        ({"audio": {}}, "audio is not supported by this server"),
        ({"colour": 1}, "Unrecognized request argument supplied: colour"),
        ({"x" * 100: 1}, "Unrecognized request argument supplied: " + "x" * 100),
        ({"x" * 101: 1}, f"Unrecognized request argument supplied: '{'x' * 100}'"),
        ({"a\nb": 1}, r"Unrecognized request argument supplied: 'a\nb'"),
    ],
)
def test_a_refused_field_is_named_on_one_line(body: dict[str, object], message: str) -> None:
    """With what to do instead, where there is something; True is not 1."""
    with pytest.raises(ApiError) as caught:
        Body(Whole, FIELDS).read(json.dumps(body).encode())
    assert str(caught.value) == message


def test_a_whole_number_with_a_point_is_one_where_numbers_are_whole() -> None:
    """Where fractions are allowed it stays what it was."""
    read = Body(Whole, FIELDS).read(b'{"count": 2.0, "size": 2.0, "share": 2.0, "label": 2.0}').request
    numbers = (read.count, read.size, read.share, read.label)
    assert numbers == (2, 2.0, 2.0, 2)
    assert [type(number) for number in numbers] == [int, float, float, int]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "cut", "fitting"),
    [
        (9, None, False, None), (9, 1, False, 1), (9, 2, False, None), (9, 2, True, 1), (3, 7, False, 7),
        (3, 8, True, 7), (10, None, True, None), (10, 1, True, None),
    ],
)  # fmt: skip
def test_max_tokens_fits_to_the_last_token(
    prompt: int, max_tokens: int | None, cut: bool, fitting: int | None
) -> None:
    """The prompt leaves room for one at least, and what is asked for fits or is cut."""
    model = cast(Model, SimpleNamespace(context_tokens=10))
    if prompt == 10 or (max_tokens == 2 and not cut):
        with pytest.raises(ContextTooLong):
            fitting_max_tokens("max_tokens", [1] * prompt, max_tokens, model, cut=cut)
    else:
        assert fitting_max_tokens("max_tokens", [1] * prompt, max_tokens, model, cut=cut) == fitting


def test_too_many_tokens_are_cut_or_refused_as_told() -> None:
    """Agents ask for 32,000 whatever the model."""
    for overflow, status in (("cut", 200), ("refuse", 400)):
        with ScriptedFront(max_tokens_overflow=overflow) as asked:
            for path, body in ((CHAT, chat("a" * 1000)), (TEXT, {"prompt": "a" * 1000})):
                reply = post(asked.front, path, {**body, "max_tokens": 32_000})
                assert reply.status == status
                if status == 200:
                    assert (
                        asked.client.options[-1]["max_tokens"] == 4096 - reply.json["usage"]["prompt_tokens"]
                    )
                else:
                    assert reply.error["code"] == "context_length_exceeded"
    with ScriptedFront() as asked:
        asked.chat()
        assert asked.client.options[-1]["max_tokens"] is None
        assert asked.chat(messages=[{"role": "user", "content": "a" * 4096}]).error["code"] == (
            "context_length_exceeded"
        )


def test_the_models_own_sampling_is_the_default() -> None:
    """As generation_config.json has it; a request and the server's option win over it."""
    facts: dict[str, str | bool | int] = {
        "default_temperature": "0.6", "default_top_p": "0.95", "default_top_k": "20",
    }  # fmt: skip

    def sampling(asked: ScriptedFront, **body: object) -> tuple[object, ...]:
        assert asked.chat(**body).status == 200
        options = asked.client.options[-1]
        return options["temperature"], options["top_p"], options["top_k"]

    with ScriptedFront(facts=facts) as asked:
        assert sampling(asked) == (0.6, 0.95, 20)
        assert sampling(asked, temperature=0, top_p=1, top_k=0) == (0, 1, 0)
        (card,) = get(asked.front, "/v1/models").json["data"]
        assert card["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    with ScriptedFront(facts=facts, default_temperature=0.2) as asked:
        assert sampling(asked) == (0.2, 0.95, 20)
    with ScriptedFront() as asked:
        assert sampling(asked) == (1.0, 1.0, 0)


def test_any_name_may_be_an_alias() -> None:
    """Agents have names of their own for models; the longest pattern that fits decides, and none is listed."""
    aliases = {"*": "scripted", "claude-*": "nobody", "gpt-4o": "scripted"}
    with ScriptedFront(aliases=aliases) as asked:
        assert asked.chat(model="anything/at-all").json["model"] == "anything/at-all"
        assert asked.chat(model="claude-haiku-4-5").status == 404
        assert [card["id"] for card in get(asked.front, "/v1/models").json["data"]] == ["gpt-4o", "scripted"]
    with ScriptedFront() as asked:
        assert asked.chat(model="default_model").status == 200
        assert asked.chat(model="gpt-4o").status == 404


def test_why_it_stopped_is_told_as_vllm_tells_it(asked: ScriptedFront) -> None:
    """The string or the token of the request's own; null for the model's end, and for length."""
    (s,) = asked.client._tokenizer.encode("s")
    say: tuple[dict[str, Any], ...] = {"stop": ["e"]}, {"stop_token_ids": [s]}, {}, {"max_tokens": 1}
    reasons = [asked.chat(**fields).json["choices"][0] for fields in say]
    assert [reason["stop_reason"] for reason in reasons] == ["e", s, None, None]
    streamed = asked.chat(stream=True, stop="e").events[-1]["choices"][0]
    assert (streamed["finish_reason"], streamed["stop_reason"]) == ("stop", "e")
    assert reasons[0]["message"]["annotations"] == []
