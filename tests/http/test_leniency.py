"""What clients send that OpenAI's own API would not take, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.scripted import TOOLS_TEMPLATE, ScriptedClient
from tests.http.serving import Reply, call, chat, get, post, serving
from zmqengine.engine.fake_tokenizer import CHAT_TEMPLATE
from zmqengine_http import HttpConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: dict[str, object] = {"role": "user", "content": "Hi"}
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}off{% elif enable_thinking %}on{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }};{% endfor %}"
)


class Asked:
    """A front-end on a model that says "yes", and what that model was asked."""

    def __init__(self, template: str = TOOLS_TEMPLATE, **options: Any) -> None:
        self.client = ScriptedClient(
            lambda prompt: "yes", template=template, facts=options.pop("facts", None)
        )
        self._serving = serving(HttpConfig(**options), lambda address, on_event: self.client)

    def __enter__(self) -> Asked:
        self.front = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def chat(self, **body: object) -> Reply:
        return post(self.front, CHAT, {"messages": [USER], **body})


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Asked() as asked:
        yield asked


def test_keys_of_other_servers_in_messages_and_tools_end_no_conversation(asked: Asked) -> None:
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


def test_arguments_of_a_call_may_be_an_object() -> None:
    """mlx-lm's own tests send them so; the template gets the same as from text."""
    with Asked("{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}") as asked:
        for arguments in ({"a": 1}, '{"a": 1}'):
            calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
            assert asked.chat(messages=[{"role": "assistant", "tool_calls": calls}]).status == 200
        assert asked.client.prompts[0] == asked.client.prompts[1]
        assert '{"a": 1}' in asked.client.prompts[0]


def test_a_reasoning_by_either_name_reaches_the_template() -> None:
    """reasoning_content is DeepSeek's name, reasoning vLLM's."""
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}|{{ m.content }}{% endfor %}"
    with Asked(template) as asked:
        for name in ("reasoning", "reasoning_content"):
            answer = {"role": "assistant", "content": "b", name: "thought"}
            asked.chat(messages=[USER, answer, USER])
        assert asked.client.prompts[0] == asked.client.prompts[1]
        assert "thought|b" in asked.client.prompts[0]


def test_unknown_fields_are_refused_or_ignored_by_name() -> None:
    """mlx-lm's, llama.cpp's and vLLM's own; the header tells which were not looked at."""
    body: dict[str, object] = {"repetition_context_size": 20, "xtc_probability": 0.1, "bad name\n": 1}
    with Asked(unknown_fields="ignore") as asked:
        reply = asked.chat(**body)
        assert reply.status == 200
        assert reply.headers["x-ignored-fields"] == "repetition_context_size, xtc_probability"
        assert "x-ignored-fields" not in asked.chat().headers
        assert asked.chat(guided_regex="a").status == 400
    with Asked() as asked:
        assert asked.chat(**body).error["param"] == "repetition_context_size"


@pytest.mark.parametrize("text", [r"a\ud83d", r"\ude00b", r"\ud83d\ud83d\ude00", r"\\ud83d \uD83D"])
def test_half_a_surrogate_pair_becomes_the_replacement_character(asked: Asked, text: str) -> None:
    """JavaScript makes it by cutting a string in an emoji; refused, it stays in the conversation for ever."""
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text.encode()
    reply = call(asked.front, "POST", CHAT, body)
    assert reply.status == 200, reply.body
    expected = json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "\ufffd" in expected
    assert expected in asked.client.prompts[-1]


def test_small_things_are_taken(asked: Asked) -> None:
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
    with Asked(ALTERNATING) as asked:
        assert asked.chat(messages=messages).status == 200
        assert asked.client.prompts == ["user: Hi\n\nthere;assistant: A;user: Hi;"]
        refusal = asked.chat(messages=[{"role": "assistant", "content": "A"}])
        assert "roles must alternate" in refusal.error["message"]
    with Asked("{% for m in messages %}{{ m.content }};{% endfor %}") as asked:
        asked.chat(messages=messages)
        assert asked.client.prompts == ["Hi;there;A;Hi;"]


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (SWITCH + CHAT_TEMPLATE, {"none": "off", "low": "on", "high": "on", "xhigh": "on"}),
        (SWITCH.replace("enable_thinking", "thinking") + CHAT_TEMPLATE, {"none": "off", "medium": "on"}),
        ("{{ reasoning_effort }}" + CHAT_TEMPLATE, {"none": "none", "high": "high"}),
        ("thinking{{ messages[0].thinking }}" + CHAT_TEMPLATE, {"none": "thinking", "high": "thinking"}),
    ],
    ids=["enable_thinking", "thinking", "effort", "neither"],
)
def test_an_effort_is_said_in_the_words_of_the_template(template: str, efforts: dict[str, str]) -> None:
    """Agents send it to whatever they take for a reasoning model; where there is no word for it, it is taken."""
    with Asked(template) as asked:
        for effort, said in efforts.items():
            assert asked.chat(reasoning_effort=effort).status == 200
            assert asked.client.prompts[-1].startswith(said)


def test_too_many_tokens_are_cut_or_refused_as_told() -> None:
    """Agents ask for 32,000 whatever the model."""
    for overflow, status in (("cut", 200), ("refuse", 400)):
        with Asked(max_tokens_overflow=overflow) as asked:
            for path, body in ((CHAT, chat("a" * 1000)), (TEXT, {"prompt": "a" * 1000})):
                reply = post(asked.front, path, {**body, "max_tokens": 32_000})
                assert reply.status == status
                if status == 200:
                    assert (
                        asked.client.options[-1]["max_tokens"] == 4096 - reply.json["usage"]["prompt_tokens"]
                    )
                else:
                    assert reply.error["code"] == "context_length_exceeded"
    with Asked() as asked:
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

    def sampling(asked: Asked, **body: object) -> tuple[object, ...]:
        assert asked.chat(**body).status == 200
        options = asked.client.options[-1]
        return options["temperature"], options["top_p"], options["top_k"]

    with Asked(facts=facts) as asked:
        assert sampling(asked) == (0.6, 0.95, 20)
        assert sampling(asked, temperature=0, top_p=1, top_k=0) == (0, 1, 0)
        (card,) = get(asked.front, "/v1/models").json["data"]
        assert card["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    with Asked(facts=facts, default_temperature=0.2) as asked:
        assert sampling(asked) == (0.2, 0.95, 20)
    with Asked() as asked:
        assert sampling(asked) == (1.0, 1.0, 0)


def test_any_name_may_be_an_alias() -> None:
    """Agents have names of their own for models; the longest pattern that fits decides, and none is listed."""
    aliases = {"*": "scripted", "claude-*": "nobody", "gpt-4o": "scripted"}
    with Asked(aliases=aliases) as asked:
        assert asked.chat(model="anything/at-all").json["model"] == "anything/at-all"
        assert asked.chat(model="claude-haiku-4-5").status == 404
        assert [card["id"] for card in get(asked.front, "/v1/models").json["data"]] == ["gpt-4o", "scripted"]
    with Asked() as asked:
        assert asked.chat(model="default_model").status == 200
        assert asked.chat(model="gpt-4o").status == 404


def test_why_it_stopped_is_told_as_vllm_tells_it(asked: Asked) -> None:
    """The string or the token of the request's own; null for the model's end, and for length."""
    (s,) = asked.client._tokenizer.encode("s")
    say: tuple[dict[str, Any], ...] = {"stop": ["e"]}, {"stop_token_ids": [s]}, {}, {"max_tokens": 1}
    reasons = [asked.chat(**fields).json["choices"][0] for fields in say]
    assert [reason["stop_reason"] for reason in reasons] == ["e", s, None, None]
    streamed = asked.chat(stream=True, stop="e").events[-1]["choices"][0]
    assert (streamed["finish_reason"], streamed["stop_reason"]) == ("stop", "e")
    assert reasons[0]["message"]["annotations"] == []
