"""Nothing that runs on the event loop, or holds the interpreter's lock, grows faster than what a client sends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.http.call_grammars.test_call_grammars import CANONICAL, Family, tool
from tests.http.scripted import ScriptedClient
from tests.support.doubling import check_linear
from zmqengine.protocol.messages import Limits, ModelCard
from zmqengine_client.text.stop_strings import StopAutomaton, StopStrings
from zmqengine_client.text.tool_calls import FORMATS, TextSplitter, make_splitter
from zmqengine_client.text.tool_calls.schema_types import types_of
from zmqengine_http.apis.anthropic.conversation import to_chat
from zmqengine_http.apis.anthropic.request import MESSAGES_BODY
from zmqengine_http.apis.chat_completions.request import (
    CHAT_BODY,
    chat_template_messages,
    chat_template_tools,
)
from zmqengine_http.apis.completions.request import COMPLETION_BODY
from zmqengine_http.apis.embeddings.request import EMBEDDING_BODY, RERANK_BODY
from zmqengine_http.apis.model_control import COMMAND_BODY
from zmqengine_http.apis.ollama.embed import EMBED_BODY
from zmqengine_http.apis.ollama.request import CHAT_BODY as OLLAMA_CHAT_BODY
from zmqengine_http.apis.ollama.request import GENERATE_BODY, chat_fields, completion_fields
from zmqengine_http.apis.responses.conversation import InputItems
from zmqengine_http.apis.responses.request import RESPONSES_BODY, Item
from zmqengine_http.apis.responses.response_memory import ItemMemory, ResponseMemory
from zmqengine_http.apis.responses.tools import ToolBook
from zmqengine_http.apis.tokenizing import DETOKENIZE_BODY, TOKENIZE_BODY
from zmqengine_http.generating.chat import Chat
from zmqengine_http.generating.chat import _splitter as _splitter_of_chat
from zmqengine_http.generating.generation import check_ids
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.prompt.template import render_chat
from zmqengine_http.serving import body as body_of_request
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.stable_head import AnswerMemory, StableHead
from zmqengine_http.workers.worker import Model

# --- what is read of prompts -------------------------------------------------------------------------------

EVERY_FORMAT = pytest.mark.skipif(
    "ZMQENGINE_TEST_EVERY_FORMAT" not in os.environ, reason="ten minutes: set ZMQENGINE_TEST_EVERY_FORMAT=1"
)

HEAD = StableHead(AnswerMemory())
TEXTS: dict[str, Callable[[int], str]] = {
    "blanks": lambda n: " " * n,
    "lines": lambda n: "\n" * n,
    "blanks, then a countdown": lambda n: " " * n + "<total_tokens>",
    "countdowns": lambda n: "<total_tokens>1</total_tokens>" * n,
    "countdowns between blanks": lambda n: " \t" * n + "<total_tokens>1</total_tokens>" + " \t" * n,
    "open countdowns": lambda n: "<total_tokens>" * n,
    "blanks and open countdowns": lambda n: " <total_tokens>" * n,
    "reminders": lambda n: "<system-reminder>" * n + "<total_tokens>1</total_tokens>",
    "a billing line": lambda n: "x-anthropic-billing-header:" * n,
    "a billing line and lines": lambda n: "x-anthropic-billing-header:" + "\n" * n,
}


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_head_of_a_prompt(text: Callable[[int], str], role: str) -> None:
    """100,000 blanks in a system message stopped every stream for six seconds."""
    check_linear(
        lambda n: [dict[str, object](role=role, content=text(n))],
        lambda each: HEAD.normalize(each, []),
        10_000,
        320_000,
    )


MESSAGES: dict[str, Callable[[int], list[dict[str, object]]]] = {
    "users": lambda n: [{"role": "user", "content": "a"}] * n,
    "systems": lambda n: [{"role": "system", "content": "a"}] * n,
    "turns": lambda n: [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * n,
    "open calls": lambda n: [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_call(place) for place in range(n)]},
        *[dict[str, object](role="system", content="s")] * n,
        *[dict[str, object](role="tool", tool_call_id="1", content="r")] * n,
    ],
}  # fmt: skip


def _call(place: int) -> dict[str, object]:
    return {"id": str(place), "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_many_messages(messages: Callable[[int], list[dict[str, object]]]) -> None:
    """Normalised and rendered by a template."""
    model = _scripted()
    check_linear(messages, lambda each: HEAD.normalize(each, []), 1000, 64_000)
    check_linear(messages, lambda each: render_chat(model, each, [], {}), 500, 16_000)


def _scripted() -> Model:
    client = ScriptedClient(lambda prompt: "")
    card = ModelCard("scripted", 300, 2**20, [0], client.bundle.hash, 0)
    return Model(card, Limits(2**24, 4000, 4096, 64, 64, 64), client._tokenizer)


# --- bodies ------------------------------------------------------------------------------------------------


def _chat(body: bytes) -> object:
    request = CHAT_BODY.read(body).request
    return chat_template_messages(request.messages), chat_template_tools(request.tools)


def _responses(body: bytes) -> object:
    request = RESPONSES_BODY.read(body).request
    return InputItems(request).messages, ToolBook(request.tools)


def _messages(body: bytes) -> object:
    return to_chat(_scripted(), MESSAGES_BODY.read(body).request)


def _ollama(body: bytes) -> object:
    return CHAT_BODY.read_document(chat_fields(OLLAMA_CHAT_BODY.read(body).request))


def _ollama_prompt(body: bytes) -> object:
    return COMPLETION_BODY.read_document(completion_fields(GENERATE_BODY.read(body).request))


def _embeddings(body: bytes) -> object:
    return EMBEDDING_BODY.read(body).request.texts


def _rerank(body: bytes) -> object:
    return RERANK_BODY.read(body).request.passages


def _detokenize(body: bytes) -> object:
    return check_ids("tokens", DETOKENIZE_BODY.read(body).request.tokens, _scripted())


def _calls_and_results(
    n: int, name: Callable[[int], str], of_result: str | None = "the call's"
) -> Mapping[str, Any]:
    """A chat of Ollama with `n` calls and their results, the last call answered first."""
    calls = [{"function": {"name": name(i), "arguments": {}}} for i in range(n)]
    results = [
        {"role": "tool", "content": "r", "tool_name": name(i) if of_result == "the call's" else of_result}
        for i in reversed(range(n))
    ]
    return {"model": "m", "messages": [{"role": "assistant", "tool_calls": calls}, *results]}


def _stored(n: int) -> tuple[ResponseMemory, ItemMemory, bytes]:
    """`n` responses, each after the one before it, and a request for all of their items and references to others."""
    responses, items = ResponseMemory(), ItemMemory()
    for i in range(n):
        item = Item(role="user", content=[{"type": "input_text", "text": "a"}])
        responses.remember("o", f"r{i - 1}" if i else None, [item], {"id": f"r{i}", "output": []})
        items.remember("o", {"id": f"m{i}", "type": "message", "role": "user", "content": "a"})
    references = [{"type": "item_reference", "id": f"m{i}"} for i in range(n)]
    body = {"input": references, "previous_response_id": f"r{n - 1}"}
    return responses, items, json.dumps(body).encode()


def test_what_was_stored_is_read_in_time() -> None:
    """Conversations of many turns, and references to many items."""

    def read(stored: tuple[ResponseMemory, ItemMemory, bytes]) -> None:
        responses, items, body = stored
        request = RESPONSES_BODY.read(body).request
        earlier = responses.conversation("o", request.previous_response_id or "")
        assert earlier is not None
        assert len(InputItems(request, functools.partial(items.find, "o"), earlier).messages) == 2 * len(
            earlier
        )

    check_linear(_stored, read, 500, 8_000)


PART = {"type": "text", "text": "a"}
FUNCTION = {"name": "f", "parameters": {}}
BODIES: dict[str, tuple[Callable[[bytes], object], Callable[[int], Mapping[str, Any]]]] = {
    "chat, messages": (_chat, lambda n: {"messages": [{"role": "user", "content": "a", "name": None}] * n}),
    "chat, parts": (_chat, lambda n: {"messages": [{"role": "user", "content": [PART] * n}]}),
    "chat, calls": (_chat, lambda n: {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * n}]}),
    "chat, a text": (_chat, lambda n: {"messages": [{"role": "user", "content": "\ud83d\\" * n}]}),
    "chat, stops": (_chat, lambda n: {"messages": [{"role": "user", "content": ""}], "stop": ["a"] * n}),
    "chat, biases": (_chat, lambda n: {
        "messages": [{"role": "user", "content": ""}], "logit_bias": {str(i): 1 for i in range(n)}}),
    "chat, unknown fields": (_chat, lambda n: {f"x{i}": 1 for i in range(n)}),
    "completions, prompts": (COMPLETION_BODY.read, lambda n: {"prompt": ["a"] * n}),
    "completions, tokens": (COMPLETION_BODY.read, lambda n: {"prompt": [1] * n}),
    "messages, messages": (_messages, lambda n: {
        "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * n}),
    "messages, blocks": (_messages, lambda n: {
        "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [PART] * n}]}),
    "messages, results": (_messages, lambda n: {
        "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [PART]}] * n}]}),
    "messages, tools": (_messages, lambda n: {
        "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": ""}],
        "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(n)]}),
    "responses, users": (_responses, lambda n: {"input": [{"role": "user", "content": "a"}] * n}),
    "responses, answers": (_responses, lambda n: {"input": [{"role": "assistant", "content": "a" * 40}] * n}),
    "responses, reasoning": (_responses, lambda n: {"input": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 40}]}] * n}),
    "responses, outputs": (_responses, lambda n: {"input": [{"type": "function_call_output", "call_id": "1", "output": [
        {"type": "input_text", "text": "a"}] * n}]}),
    "chat, a schema": (_chat, lambda n: {
        "messages": [{"role": "user", "content": ""}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {str(i): {} for i in range(n)}}}}]}),
    "responses, calls": (_responses, lambda n: {"input": [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * n}),
    "responses, tools": (_responses, lambda n: {
        "input": "a", "tools": [{"type": "function", "name": f"f{i}", "parameters": {}} for i in range(n)]}),
    "responses, a namespace": (_responses, lambda n: {"input": "a", "tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": f"f{i}"} for i in range(n)]}]}),
    "tokenize, messages": (TOKENIZE_BODY.read, lambda n: {"messages": [{"role": "user", "content": "a"}] * n}),
    "ollama, messages": (_ollama, lambda n: {"model": "m", "messages": [{"role": "user", "content": "a"}] * n}),
    "ollama, images": (_ollama, lambda n: {
        "model": "m", "messages": [{"role": "user", "content": "a", "images": ["x"] * n}]}),
    "ollama, options": (_ollama, lambda n: {
        "model": "m", "messages": [{"role": "user", "content": "a"}], "options": {f"x{i}": 1 for i in range(n)}}),
    "ollama, results of one tool": (_ollama, lambda n: _calls_and_results(n, lambda i: "f")),
    "ollama, results of many tools": (_ollama, lambda n: _calls_and_results(n, lambda i: f"f{i}")),
    "ollama, results of other tools": (_ollama, lambda n: _calls_and_results(n, lambda i: "f", "g")),
    "ollama, results without a name": (_ollama, lambda n: _calls_and_results(n, lambda i: "f", None)),
    "ollama, a prompt": (_ollama_prompt, lambda n: {"model": "m", "prompt": "a " * n, "raw": True}),
    "ollama, embed": (EMBED_BODY.read, lambda n: {"model": "m", "input": ["a"] * n}),
    "embeddings, texts": (_embeddings, lambda n: {"input": ["a"] * n}),
    "embeddings, tokens": (_embeddings, lambda n: {"input": [[1]] * n}),
    "rerank": (_rerank, lambda n: {"query": "q", "documents": [{"text": "a"}] * n}),
    "model control": (COMMAND_BODY.read, lambda n: {"model": "m", **{f"x{i}": 1 for i in range(n)}}),
    "detokenize": (_detokenize, lambda n: {"tokens": [1] * n}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_many(name: str) -> None:
    """Read, checked and translated; a 400 counts as an answer."""
    read, make = BODIES[name]

    def work(body: bytes) -> None:
        with contextlib.suppress(ApiError):
            read(body)

    check_linear(lambda n: json.dumps(make(n)).encode("utf-8", "surrogatepass"), work, 1000, 64_000)


@pytest.mark.parametrize(
    "name", ["chat, messages", "chat, parts", "chat, calls", "messages, blocks", "responses, users"]
)
def test_more_objects_than_any_chat_has_are_refused_unread(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400,000 messages held the loop for a second; the bound itself is taken."""
    monkeypatch.setattr(body_of_request, "OBJECTS_MAX", 100)
    read, make = BODIES[name]
    parts = 1 if name.endswith(("parts", "blocks", "calls")) else 0
    read(json.dumps(make(100 - parts)).encode())
    with pytest.raises(ApiError, match="101 objects are more than the 100") as refusal:
        read(json.dumps(make(101 - parts)).encode())
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("responses, a namespace", "objects"), ("messages, results", "objects"), ("embeddings, tokens", "objects"),
        ("responses, outputs", "objects"), ("chat, biases", "members"), ("ollama, images", "members"),
        ("ollama, options", "members"), ("embeddings, texts", "members"), ("chat, a schema", "members"),
    ],
)  # fmt: skip
def test_they_are_counted_at_any_depth(name: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace of 400,000 tools held the loop for four seconds; nothing in a text is counted."""
    monkeypatch.setattr(body_of_request, "OBJECTS_MAX", 100)
    monkeypatch.setattr(body_of_request, "MEMBERS_MAX", 500)
    read, make = BODIES[name]
    # The error of a body of more than 500 names no field.
    with pytest.raises(
        ApiError, match=rf" {of} are more than the |the body has \d+ .*more than the "
    ) as refusal:
        read(json.dumps(make(600)).encode())
    assert refusal.value.status == 400
    _chat(json.dumps({"messages": [{"role": "user", "content": '{["a": ' * 1000}]}).encode())


@pytest.mark.parametrize(
    ("body", "of"),
    [
        ('{"a": [%s 1]}', "1,"), ('{"a": [%s ""]}', '"",'), ('{"a": [%s {}]}', "{},"), ('{"a": [%s []]}', "[],"),
        ('{%s "a": 1}', '"k": 1,'), ('{"a": "\\ud83d%s"}', r"\ud83d"), ('{"a": "\\ud83d", "b": [%s 1]}', "1,"),
    ],
)  # fmt: skip
def test_a_body_of_millions_of_values_is_refused_undecoded(
    body: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 MB of them held the loop for one to two seconds. Marks in texts are none, escaped or not."""
    monkeypatch.setattr(body_of_request, "OBJECTS_MAX", 50)
    monkeypatch.setattr(body_of_request, "MEMBERS_MAX", 300)
    monkeypatch.setattr(body_of_request, "VALUES_MAX", 400)
    body_of_request.json_object((body % (of * 40)).encode())
    text = '{["a": 1}],' * 1000 + "\\" * 999 + '"'
    document = {"a": text, "b": ["\\"] * 3, "c": '"' * 5000}
    assert body_of_request.json_object(json.dumps(document).encode()) == document
    if "ud83d" not in of:
        monkeypatch.setattr("msgspec.json.decode", None)
    with pytest.raises(ApiError, match=r"the body has 1?\d\d\d .*, more than the [349]00 that are read"):
        body_of_request.json_object((body % (of * 1000)).encode())


@pytest.mark.parametrize(("value", "inside"), [('"', "\\n"), ("[", "1,"), ("[", '"",')])
def test_a_prefill(value: str, inside: str) -> None:
    """The beginning of an answer is as long as a body, and read at once."""
    model = _model_of("json_tools")
    beginning = '<tool_call>\n{"name": "f", "arguments": {"a": ' + value

    def read(text: str) -> None:
        chat = Chat(id="1", model=model, messages=[])
        _splitter_of_chat(chat, {"f": {}}, Prompt([1], prefill=text))

    check_linear(lambda n: beginning + inside * n, read, 80_000, 320_000)


# --- schemas -----------------------------------------------------------------------------------------------


def _object(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def _nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(min(n, 300)):
        schema = _object({"a": schema}, required=["a"])
    return schema


SCHEMAS: dict[str, Callable[[int], dict[str, Any]]] = {
    "properties": lambda n: _object({f"p{i}": {"type": "string"} for i in range(n)}),
    "required": lambda n: _object(
        {f"p{i}": {} for i in range(n)}, required=[f"p{i}" for i in range(n)], additionalProperties=False
    ),
    "choices": lambda n: _object({"a": {"anyOf": [{"const": i} for i in range(n)]}}),
    "tagged choices": lambda n: _object({"a": {"oneOf": [
        _object({"t": {"const": i}}, required=["t"]) for i in range(n)]}}),
    "wide tags": lambda n: _object({"a": {"oneOf": [
        _object({f"t{i}": {"const": place} for i in range(n)}, required=[f"t{i}" for i in range(n)])
        for place in range(2)]}}),
    "values": lambda n: _object({"a": {"enum": [f"v{i}" for i in range(n)]}}),
    "references to one": lambda n: _object(
        {f"p{i}": {"$ref": "#/$defs/a", "description": "d"} for i in range(n)},
        **{"$defs": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}),
    "references to a large one": lambda n: _object(
        {f"p{i}": {"$ref": "#/$defs/a", "title": "d"} for i in range(n)},
        **{"$defs": {"a": {**{f"x{i}": 1 for i in range(n)}, "anyOf": [{"const": i} for i in range(n)]}}}),
    "references to each other": lambda n: _object(
        {"a": {"$ref": "#/$defs/d0"}},
        **{"$defs": {f"d{i}": {"anyOf": [
            {"$ref": f"#/$defs/d{j % n}", "title": "t"} for j in (i + 1, i + 7, i * i)]} for i in range(n)}}),
    "a long reference": lambda n: _object(
        {f"p{i}": {"$ref": "#/$defs/a"} for i in range(n)},
        **{"$defs": {"a": {"$ref": "#/$defs/" + "b" * n}, "b" * n: {"type": "string"}}}),
    "depth": _nested,
    "a description": lambda n: _object({"a": {"type": "string", "description": "/\\" * n}}),
    "a pattern": lambda n: _object({"a": {"type": "string", "pattern": "/\\/" * n}}),
}  # fmt: skip
_family = functools.lru_cache(None)(Family)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_grammar_of_a_schema(schema: Callable[[int], dict[str, Any]], name: str) -> None:
    """Made, or refused, with a head that is sorted."""
    _check_grammar(schema, name, strict=False)


@pytest.mark.slow
@EVERY_FORMAT
@pytest.mark.parametrize(
    "name", ["json_tools", "qwen3_coder", "gemma4", "pythonic", "glm47", "deepseek_v32", "harmony"]
)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_grammar_of_a_schema_in_other_formats(schema: Callable[[int], dict[str, Any]], name: str) -> None:
    """Those that write values in another way, and strict ones."""
    _check_grammar(schema, name, strict=True)


def _check_grammar(schema: Callable[[int], dict[str, Any]], name: str, *, strict: bool) -> None:
    family = _family(name)

    def work(parameters: dict[str, Any]) -> None:
        tools = [tool("f", parameters, strict=strict)]
        with contextlib.suppress(ApiError, RecursionError):
            HEAD.normalize([], tools)
            family.hold(tools)

    check_linear(schema, work, 500, 8000)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_types_of_an_argument(schema: Callable[[int], dict[str, Any]]) -> None:
    """Asked for each argument that the model writes: no more than a fixed number of alternatives."""
    check_linear(
        schema, lambda root: [types_of(part, root) for part in root["properties"].values()], 500, 16_000
    )


# --- outputs -----------------------------------------------------------------------------------------------

STOPS: dict[str, Callable[[int], list[str]]] = {
    "alike": lambda n: ["a" * n],
    "almost": lambda n: ["a" * n + "b"],
    "many": lambda n: ["a" * i + "c" for i in range(1, 17)] + ["ab" * n],
    "emoji": lambda n: ["\U0001f600" * n + chr(65 + i) for i in range(16)],
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_stop_strings(stops: Callable[[int], list[str]]) -> None:
    """Both in what they hold and in the text that they are sought in."""
    check_linear(stops, StopAutomaton, 1000, 8000)
    automaton = StopAutomaton(stops(1000))

    def read(text: str) -> None:
        finder = StopStrings(automaton)
        for place in range(0, len(text), 4):
            finder.push(text[place : place + 4])

    for letter in ("a", "ab", "\U0001f600"):
        check_linear(lambda n, letter=letter: letter * n, read, 10_000, 160_000)  # type: ignore[misc]


COMMON = (
    " ", "\n", "a", '"', "\\", "{", "[[", '{"a":', "<", "</", "<parameter=a>", "<arg_key>", "<|tool_call_begin|>",
    "<tool_call>", "</tool_call>", "<think>", "<|message|>", "\u20ac",
)  # fmt: skip
ATOMS = (
    *COMMON, "\\u12", "[", "(", "null", "1", ",", "}", ">", "=", "<a", "'", '{"name": "f", ',
    '{"name": "f", "arguments": {}}', "f(a=1)", "call:f{}", "```", "```json", "f[ARGS]{}", "[TOOL_CALLS]",
    "<function=f>", "<function=f", "<parameter=a", "<![CDATA[", "]]>", "<invoke name=", "<arg_key>a</arg_key>",
    "<arg_value>", "<|tool_call_begin|>f<|tool_call_argument_begin|>", "<|tool_call:begin|>",
    "<|tool_call:begin|><|tool_call:name|>f<|tool_call:args|>", '<|open|>call tool="f"<|sep|>',
    '<|open|>argument key="', "<|sep|>", "<|channel|>", "<|end|>", "<|start|>", "]<]minimax[>[<", "]<]minimax[>[<a>",
    "]<]minimax[>[</a>", "</think>", "\uff5c", '<|"|>', "<escape>",
)  # fmt: skip
REPRESENTATIVES = ("json_tools", "qwen3_coder", "harmony")


def _splitter(name: str) -> TextSplitter:
    schemas: dict[str, dict[str, object]] = {"f": {}, "get_weather": {}}
    splitter = make_splitter(_model_of(name).markers, reasoning_open=False, tools=schemas)
    assert splitter is not None
    return splitter


@functools.lru_cache(None)
def _model_of(name: str) -> Model:
    return _family(name, special=False, template="<think></think>" if name != "harmony" else "").model


def _beginnings(name: str) -> list[str]:
    """Texts after which an output is within a call, its header, its arguments, or in none of these."""
    whole = CANONICAL.get(name, "").replace("@@", '{"city": "Prag"')
    if name == "harmony":
        header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        return ["", "<|channel|>final<|message|>", header, header + '{"a": "']
    start = FORMATS[name].start
    return [
        "",
        start,
        start + '{"name": "f", "arguments": {"a": "',
        whole[: whole.find("Prag") + 2] if whole else start,
    ]


def _check_splitter(name: str, atom: str) -> None:
    for beginning in _beginnings(name):

        def make(n: int, beginning: str = beginning) -> list[str]:
            text = beginning + atom * (n // len(atom))
            return [text[place : place + 8] for place in range(0, len(text), 8)]

        def read(pieces: list[str]) -> None:
            splitter = _splitter(name)
            for piece in pieces:
                splitter.feed(piece)
            splitter.finish()

        try:
            check_linear(make, read, 16_000, 128_000)
        except AssertionError as error:
            raise AssertionError(f"{beginning!r} + {atom!r} * n: {error}") from None


@pytest.mark.parametrize(
    ("name", "atom"),
    [
        pytest.param(name, atom, marks=() if (place + number) % 3 == 0 else pytest.mark.slow)
        for number, name in enumerate(REPRESENTATIVES)
        for place, atom in enumerate(COMMON)
    ],
)
def test_an_output_piece_by_piece(name: str, atom: str) -> None:
    """A model that loops, or is told to by a guided_regex, costs no more for each token than for the first."""
    _check_splitter(name, atom)


@pytest.mark.slow
@EVERY_FORMAT
@pytest.mark.parametrize("name", sorted({*FORMATS, "harmony"}))
def test_an_output_piece_by_piece_in_any_format(name: str) -> None:
    """All formats, and more of what their calls are made of."""
    for atom in ATOMS:
        _check_splitter(name, atom)


def test_half_pairs_are_found_between_other_escapes() -> None:
    """As Python's own decoder finds them, over random strings of what may be mistaken for one."""
    chance = random.Random(4)
    pieces = (r"\\", r"\"", r"\ud83d", r"\ude00", r"\uD83D", r"\uDE00", r"\n", r"\u005c", "ud83d", "a", "é")
    for _ in range(500):
        text = "".join(chance.choices(pieces, k=8))
        wanted = json.loads(f'"{text}"').encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert body_of_request.json_object(f'{{"a": "{text}"}}'.encode()) == {"a": wanted}
