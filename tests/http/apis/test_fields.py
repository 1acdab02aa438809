"""Every field of every API is sent, and has the treatment that the table of docs/http-clients.md gives it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import msgspec
import msgspec.inspect
import pytest
from msgspec import structs

from tests.http.front import Reply, get, post
from tests.http.scripted import THINKING_SWITCH, TOOLS_TEMPLATE, USER, ScriptedFront
from tools import http_fields, pages
from tools.http_fields import COLUMNS, HONOURED, IGNORED, NAMED, Column, treatment
from zmqengine.protocol.messages import Description
from zmqengine_client.core.embedding import Embedded

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SAID = f"<think>hm</think>abcabc{CALL}{CALL}"
TEMPLATE = (
    f"{TOOLS_TEMPLATE}{THINKING_SWITCH}{{{{ reasoning_effort }}}}{{{{ extra }}}}"
    "{# <tool_call> </tool_call> <think> </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OPEN_END = {"messages": [USER, {"role": "assistant", "content": "Well"}]}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
THEIR_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

OLLAMA: dict[str, Any] = {"model": "scripted", "stream": False}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "scripted", "max_tokens": 400, "messages": [USER]},
    "/api/chat": {**OLLAMA, "messages": [USER]},
    "/api/generate": {**OLLAMA, "prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"model": "scripted", "input": "a"},
}
# Values that ask for something, for fields of which the type alone does not tell one.
VALUES: dict[str, Any] = {
    "audio": {"voice": "a"},
    "cache_scope": "shared",
    "chat_template_kwargs": {"extra": "more"},
    "continue_final_message": False,
    "add_generation_prompt": True,
    "encoding_format": "base64",
    "format": "json",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "images": [PNG],
    "include": ["reasoning.encrypted_content"],
    "input": "Bye",
    "logit_bias": {"5": 1},
    "messages": [{"role": "user", "content": "Bye"}],
    "metadata": {"user_id": "me"},
    "model": "absent",
    "num_ctx": 10**6,
    "options": {"temperature": 0.3},
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "prediction": {"type": "content", "content": "abc"},
    "prefill_keep": 0.5,
    "previous_response_id": "resp_absent",
    "prompt": "b",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "stop": ["b", "h"],
    "stop_sequence": ["b", "h"],
    "stopping_strings": ["b", "h"],
    "stop_sequences": ["b"],
    "stop_token_ids": [99],
    "store": False,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "text": {"format": {"type": "json_object"}},
    "think": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "thinking_max": 2,
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 2,
    "truncate": False,
}
OF_ENDPOINT: dict[tuple[str, str], Any] = {
    ("/v1/embeddings", "truncate"): True,
    ("/v1/messages", "tools"): [THEIR_TOOL],
    ("/v1/messages", "tool_choice"): {"type": "none"},
    ("/v1/responses", "tools"): [FLAT_TOOL],
    ("/api/chat", "stream"): True,
    ("/api/generate", "stream"): True,
}
# Fields that have an effect beside others alone; those are in both requests that are compared.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "add_generation_prompt"): OPEN_END,
    ("/v1/chat/completions", "parallel_tool_calls"): {"tools": [TOOL]},
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/chat/completions", "tool_choice"): {"tools": [TOOL]},
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "continue_final_message"): OPEN_END,
    ("/v1/completions", "stream_options"): {"stream": True},
    ("/v1/responses", "parallel_tool_calls"): {"tools": [FLAT_TOOL]},
    ("/v1/responses", "tool_choice"): {"tools": [FLAT_TOOL]},
    ("/v1/messages", "output_config"): {"thinking": {"type": "adaptive"}},
    ("/v1/messages", "tool_choice"): {"tools": [THEIR_TOOL]},
    ("/api/chat", "top_logprobs"): {"logprobs": True},
    ("/api/generate", "top_logprobs"): {"logprobs": True},
}
# Of a request: names and times, which differ without a reason.
OWN = re.compile(
    r"(chatcmpl|cmpl|resp|msg|fc|call|toolu|rs)[-_][\w-]+|\"[a-z_]*(created|completed|duration)[a-z_]*\": ?[^,}]+"
)


class Seen(NamedTuple):
    """What came of a request: to the model, and to the client."""

    status: int
    named: list[str]
    error: str
    asked: str
    answer: str


class Watched(ScriptedFront):
    """A front-end that keeps everything its model was asked."""

    def __init__(self) -> None:
        super().__init__(TEMPLATE, text=SAID, special=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
        self.embeds: list[object] = []
        self.client.embed_counted = self._embed  # type: ignore[method-assign]
        self.client.describe = self._describe  # type: ignore[method-assign]

    async def _describe(self) -> Description:
        """A worker that takes constraints."""
        described = await type(self.client).describe(self.client)
        assert described.limits is not None
        return structs.replace(described, limits=structs.replace(described.limits, constraints=True))

    async def _embed(self, texts: Sequence[str], **options: object) -> Embedded:
        self.embeds.append((texts, options))
        return await type(self.client).embed_counted(self.client, texts)

    def see(self, path: str, body: Mapping[str, Any]) -> Seen:
        """Send a body, and tell what came of it."""
        client = self.client
        client.prompts, client.options, self.embeds, chosen = [], [], [], []
        pool = self.front.service.pool
        choose = type(pool).choose

        def watched(model: Any, prompt: Any, key: Any, *more: Any) -> Any:
            chosen.append(key)
            return choose(pool, model, prompt, key, *more)

        pool.choose = watched  # type: ignore[method-assign, assignment]
        reply = post(self.front, path, body)
        options = [{**each, "request_id": ""} for each in client.options]
        return Seen(
            reply.status,
            [name for name in reply.headers.get("x-ignored-fields", "").split(", ") if name],
            self._error(reply),
            repr((client.prompts, options, self.embeds, chosen)),
            OWN.sub("", reply.body.decode()) + self._stored(path, reply),
        )

    def _stored(self, path: str, reply: Reply) -> str:
        """Whether a response can be asked for again."""
        if path != "/v1/responses" or not reply.body.startswith(b"{"):
            return ""
        return str(get(self.front, f"{path}/{reply.json.get('id')}").status)

    @staticmethod
    def _error(reply: Reply) -> str:
        if reply.status < 400:
            return ""
        error = reply.json["error"]
        return error if isinstance(error, str) else f"{error.get('param')} {error['message']}"


SENT = [
    (column, name)
    for column in COLUMNS
    for name in (*column.body.supported, *column.body.fields, *column.body.synonyms)
    if column.title in BASES
]
# Honoured by a refusal of what is not there: a model, a context, a response, or eyes.
ASKS_FOR_WHAT_IS_THERE = {"images", "model", "num_ctx", "previous_response_id"}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """One front-end for all."""
    with Watched() as front:
        yield front


def value_of(column: Column, name: str) -> Any:
    """A value that asks for something."""
    if (column.title, name) in OF_ENDPOINT:
        return OF_ENDPOINT[column.title, name]
    if name in VALUES:
        return VALUES[name]
    target = column.body.synonyms.get(name, name)
    if target in VALUES:
        return VALUES[target]
    field = next(each for each in msgspec.structs.fields(column.body.kind) if each.name == target)
    if isinstance(field.default, bool):
        return not field.default
    kinds = {type(kind) for kind in kinds_of(msgspec.inspect.type_info(field.type))}
    if msgspec.inspect.FloatType in kinds:
        return 0.5
    if msgspec.inspect.IntType in kinds:
        return 5
    assert msgspec.inspect.StrType in kinds, (
        f"{name}: no value that has an effect is known: give one in VALUES"
    )
    return "k"


def kinds_of(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    """The alternatives of a type."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return kinds_of(kind.type)
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def sent(column: Column, name: str, value: object) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The path, the body without the field, and the body with it."""
    body = {**BASES[column.title], **BESIDE.get((column.title, name), {})}
    return column.title, body, {**body, name: value}


def without_echo(answer: str, name: str, value: object) -> str:
    """An answer without the field itself: some APIs repeat it, whatever they do with it."""
    for one in (value, None, True, False, "auto", [], {}):
        answer = answer.replace(f'"{name}":{json.dumps(one, separators=(",", ":"))}', "")
    return answer


@pytest.mark.parametrize(("column", "name"), SENT, ids=lambda value: getattr(value, "title", value))
def test_a_field_is_treated_as_the_table_says(watched: Watched, column: Column, name: str) -> None:
    """By what reaches the model, what comes back, the error and the header."""
    told = treatment(column, name)
    if told == HONOURED or name in column.body.synonyms:
        value = value_of(column, name)
        path, without, body = sent(column, name, value)
        before, after = watched.see(path, without), watched.see(path, body)
        assert before.status == 200, before.error
        assert name not in after.named
        if name in ASKS_FOR_WHAT_IS_THERE:
            assert after.status in (400, 404)
            assert name.removesuffix("s") in after.error or str(value) in after.error
            return
        assert after.status == 200, after.error
        assert (before.asked, without_echo(before.answer, name, value)) != (
            after.asked,
            without_echo(after.answer, name, value),
        ), "it has no effect"
        return
    field = column.body.fields[name]
    path, without, body = sent(column, name, {"some": "thing"})
    before, after = watched.see(path, without), watched.see(path, body)
    if told in (IGNORED, NAMED):
        assert after.status == 200, after.error
        assert after.asked == before.asked
        assert (name in after.named) == (told == NAMED)
    else:
        assert after.status == 400
        assert after.error.startswith(f"{name} ")
    for neutral in (None, *field.neutral):
        quiet = watched.see(path, {**without, name: neutral})
        assert (quiet.status, quiet.named, quiet.asked) == (200, [], before.asked)


@pytest.mark.parametrize(
    "column", [each for each in COLUMNS if each.title in BASES], ids=lambda each: each.title
)
def test_an_unknown_field_is_never_dropped_in_silence(watched: Watched, column: Column) -> None:
    """It is a 400, or named."""
    path, _, body = sent(column, "qwerty", 1)
    seen = watched.see(path, body)
    assert (seen.status, seen.named) == ((200, ["qwerty"]) if column.lenient else (400, []))


def official_fields() -> Iterator[tuple[str, set[str]]]:
    """The parameters that the makers' own clients can send."""
    openai = pytest.importorskip("openai.types")
    anthropic = pytest.importorskip("anthropic.types")
    from openai.types.responses import response_create_params

    chat = openai.chat.completion_create_params.CompletionCreateParamsBase
    yield "/v1/chat/completions", set(get_type_hints(chat))
    yield "/v1/completions", set(get_type_hints(openai.completion_create_params.CompletionCreateParamsBase))
    yield "/v1/responses", set(get_type_hints(response_create_params.ResponseCreateParamsBase))
    yield "/v1/embeddings", set(get_type_hints(openai.EmbeddingCreateParams))
    yield "/v1/messages", set(get_type_hints(anthropic.message_create_params.MessageCreateParamsBase))


@pytest.mark.process
def test_every_field_of_the_official_clients_is_in_the_table() -> None:
    """None that their own packages can send is unknown to us, and none is known twice."""
    bodies = {column.title: column.body for column in COLUMNS}
    for path, official in official_fields():
        body = bodies[path]
        assert official <= {*body.supported, *body.fields, *body.synonyms}, path
        assert not set(body.supported) & set(body.fields)


@pytest.mark.process
def test_every_field_and_option_of_ollama_has_an_effect_or_is_named(watched: Watched) -> None:
    """As its own client can send them."""
    ollama = pytest.importorskip("ollama")
    from ollama import _types

    requests = {
        "/api/chat": _types.ChatRequest,
        "/api/generate": _types.GenerateRequest,
        "/api/embed": _types.EmbedRequest,
    }
    bodies = {column.title: column.body for column in COLUMNS}
    for path, kind in requests.items():
        unknown = set(vars(kind)["__pydantic_fields__"]) - {*bodies[path].supported, *bodies[path].fields}
        for name in unknown - {"options"}:
            assert watched.see(path, {**BASES[path], name: {"some": "thing"}}).named == [name]
    asked = {"stop": ["b"], "num_ctx": 10**6, "num_predict": 3, "seed": 3, "mirostat": 1, "top_k": 3}
    body = BASES["/api/chat"]
    before = watched.see("/api/chat", body)
    options: Any = ollama.Options
    for name in options.model_fields:
        after = watched.see("/api/chat", {**body, "options": {name: asked.get(name, 0.5)}})
        if after.named != [name]:
            assert (after.asked, after.answer, after.error) != (before.asked, before.answer, before.error), (
                name
            )


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    """`python -m tools` writes it."""
    path = pages.ROOT / http_fields.PAGE
    assert path.read_text("utf-8") == pages.filled(http_fields.PAGE, http_fields.parts())
