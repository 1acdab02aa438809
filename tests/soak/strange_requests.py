"""Requests of public bug reports and of attacks, for the four chat APIs, and the statuses that are right for each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

JsonObject = dict[str, Any]
# As Qwen 3.5's: arguments are iterated, and a chat without a user is refused.
TEMPLATE = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}\n"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}\n"
    "{% endfor %}{% if enable_thinking %}<think>\n{% endif %}"
)
APIS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}
USER = {"role": "user", "content": "Tell me about Tom."}
SYSTEM = {"role": "system", "content": "You are kind."}
TOOL = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "place": {"type": "string"}}},
}
STRICT = {"type": "object", "required": ["id"], "additionalProperties": False}


class Strange(NamedTuple):
    """A request, the statuses that are right, and the arguments of its answer's calls where they are known."""

    path: str
    body: JsonObject
    fine: tuple[int, ...] = (200,)
    calls: tuple[JsonObject, ...] | None = None


def called(arguments: str, id_: str = "c1", name: str = "look_up") -> JsonObject:
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(id_: str = "c1", text: str = "It is a word.") -> JsonObject:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def _both() -> JsonObject:
    calls = [called('{"word": "a"}', id_)["tool_calls"][0] for id_ in ("c1", "c2")]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


ARGUMENTS = ("", "null", "{", '{"word": "Tom', "[1]", "look it up", "{'word': 'x'}", '{"word": "C:\\Users"}')
HISTORIES: tuple[list[JsonObject], ...] = (
    *([USER, called(arguments), result()] for arguments in ARGUMENTS),
    [USER, _both(), result("c2"), result("c1"), USER],
    [USER, called("{}", "functions.look_up:0"), result("functions.look_up:0")],
    [SYSTEM],
    [SYSTEM, called('{"word": "a"}'), result()],
    [{"role": "developer", "content": "Be kind."}, USER],
    [USER, {"role": "assistant", "content": "The `<think>` tag opens it."}, USER],
    [USER, called("{}", name="gone"), result(), USER],
)
_CALL = "<function=look_up>\n<parameter=word>\n{}\n</parameter>\n</function>\n</tool_call>"
_TOM = ({"word": "Tom"},)
OUTPUTS: tuple[tuple[str, tuple[JsonObject, ...]], ...] = (
    ("I look.\n\n" + _CALL.format("Tom"), _TOM),
    ("<tool_call>\n<function=look_up>\n<parameter=word>\nTom\n</function>\n</tool_call>", _TOM),
    (
        "<tool_call>\n" + _CALL.format("<x><parameter>1</parameter></x>"),
        ({"word": "<x><parameter>1</parameter></x>"},),
    ),
    (
        "<tool_call>\n<function=look_up>\n<parameter=word>\nTom\n<parameter=place>\nTX\n</parameter>\n</function>\n"
        "</tool_call>",
        ({"word": "Tom", "place": "TX"},),
    ),
    ("The tag `<tool_call>` opens a call, and `<function=look_up>` names it. Then it goes on.", ()),
    ("The `<think>` tag is used by some. It hides text.", ()),
)
TRUNK = "Once upon a time there was a little dog. " * 8


def strange_request(chance: random.Random) -> Strange:
    """One of any kind, in any API."""
    kind: Callable[[random.Random], Strange] = chance.choice(
        (_history, _history, _output, _thinking, _integer, _limit, _scope, _foreign)
    )
    asked = kind(chance)
    return asked._replace(body={"model": "tools"} | asked.body)


def _history(chance: random.Random) -> Strange:
    return _chat(chance.choice([*APIS]), chance, chance.choice(HISTORIES))


def _output(chance: random.Random) -> Strange:
    """A model that writes beside its format: a choice of one text."""
    text, calls = chance.choice(OUTPUTS)
    asked = _chat("chat", chance, [USER])
    return asked._replace(body=asked.body | {"guided_choice": [text], "max_tokens": 400}, calls=calls)


def _thinking(chance: random.Random) -> Strange:
    api = chance.choice([*APIS])
    path, body, fine, _ = _chat(api, chance, [USER])
    budget = chance.choice((1, 16, 2048))
    wishes: dict[str, JsonObject] = {
        "chat": {"thinking_token_budget": budget, "chat_template_kwargs": {"enable_thinking": True}},
        "messages": {"thinking": {"type": "enabled", "budget_tokens": max(1024, budget)}, "max_tokens": 1100},
        "responses": {"reasoning": {"effort": chance.choice(("none", "low", "high"))}},
        "ollama": {"think": True},
    }
    body |= wishes[api]
    if api == "chat":
        body["stop"] = ["the", "Tom"]
    return Strange(path, body, fine)


def _integer(chance: random.Random) -> Strange:
    parts: tuple[JsonObject, ...] = (
        {"enum": [2**53 + 1]},
        {"const": 1234567890123456789},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1},
    )
    schema = STRICT | {"properties": {"id": chance.choice(parts)}}
    named = {"name": "answer", "strict": True, "schema": schema}
    return Strange(
        APIS["chat"],
        {
            "messages": [USER],
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": named},
        },
        (400,),
    )


def _limit(chance: random.Random) -> Strange:
    """Names, lists and texts far over what is usual."""
    long = "pico" * chance.choice((200, 30_000))
    api = chance.choice([*APIS])
    path, body, *_ = _chat(api, chance, [USER])
    match chance.choice(("model", "types", "items", "text", "picture")):
        case "model":
            return Strange(path, body | {"model": long}, (400, 404))
        case "types":
            tools = [{"type": long + str(number)} for number in range(20)]
            return Strange(
                APIS["responses"], {"input": "x", "tools": tools, "max_output_tokens": 4, "store": False}
            )
        case "items":
            items = [{"type": f"kind{number}", "content": long} for number in range(20)]
            return Strange(APIS["responses"], {"input": [*items, USER], "max_output_tokens": 4})
        case "text":
            return _chat(api, chance, [{"role": "user", "content": long * 10}])._replace(fine=(400,))
        case _:
            picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
            message = {"role": "user", "content": [picture]}
            return Strange(APIS["chat"], {"messages": [message], "max_tokens": 4}, (400,))


def _scope(chance: random.Random) -> Strange:
    """A prefix that all callers share, kept apart by their keys."""
    text = TRUNK[: chance.choice((40, 120, 300))] + str(chance.random())
    return Strange("/v1/completions", {"prompt": text, "max_tokens": 4, "cache_scope": "key"})


def _foreign(chance: random.Random) -> Strange:
    """Options of other programs."""
    option = chance.choice(
        (
            {"numa": False},
            {"main_gpu": 0},
            {"penalize_newline": True},
            {"f16_kv": True},
            {"repeat_last_n": 64},
        )
    )
    asked = _chat("ollama", chance, [USER])
    return asked._replace(body=asked.body | {"options": {"num_predict": 20, **option}})


def _chat(api: str, chance: random.Random, messages: list[JsonObject]) -> Strange:
    """The chat in the form of an API, with a tool that has no description."""
    tokens = chance.choice((4, 40, 120))
    body: JsonObject = {"model": "tools", "stream": chance.random() < 0.5}
    match api:
        case "chat":
            body |= {"messages": messages, "max_tokens": tokens}
            body["tools"] = [{"type": "function", "function": TOOL}]
        case "ollama":
            body |= {"messages": [_ollama(each) for each in messages], "options": {"num_predict": tokens}}
            body["tools"] = [{"type": "function", "function": TOOL}]
        case "responses":
            items = [item for each in messages for item in _items(each)]
            body |= {"input": items, "max_output_tokens": max(16, tokens), "store": False}
            body["tools"] = [{"type": "function", **TOOL}]
        case _:
            system = [each["content"] for each in messages if each["role"] in ("system", "developer")]
            rest = [_blocks(each) for each in messages if each["role"] not in ("system", "developer")]
            body |= {"messages": rest or [USER], "max_tokens": tokens, "system": " ".join(system)}
            body["tools"] = [{"name": "look_up", "input_schema": TOOL["parameters"]}]
    return Strange(APIS[api], body)


def _object(arguments: str) -> JsonObject:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ollama(message: JsonObject) -> JsonObject:
    role = "system" if message["role"] == "developer" else message["role"]
    calls = [
        {"function": {"name": each["function"]["name"], "arguments": _object(each["function"]["arguments"])}}
        for each in message.get("tool_calls", ())
    ]
    return {"role": role, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})}


def _items(message: JsonObject) -> list[JsonObject]:
    if message["role"] == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
        ]
    items = [{"role": message["role"], "content": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _blocks(message: JsonObject) -> JsonObject:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    calls = [
        {"type": "tool_use", "id": each["id"], "name": each["function"]["name"],
         "input": _object(each["function"]["arguments"])}
        for each in message.get("tool_calls", ())
    ]  # fmt: skip
    return {"role": message["role"], "content": calls} if calls else message
