"""What a user does with a model, tried on its chat template alone: chat, offer tools, call them, and read calls back.

What a template writes for a turn of the assistant in a history is taken for what the model would write.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zmqengine.pico import model_path
from zmqengine.protocol.messages import Limits, ModelCard, TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import Delta, make_splitter
from zmqengine_http.prompt.prompts import encode_chat
from zmqengine_http.workers.worker import Model

Message = dict[str, object]
Called = tuple[str, dict[str, object]]
SYSTEM: Message = {"role": "system", "content": "You are SYSTEM-HELPFUL."}
USER: Message = {"role": "user", "content": "USER-QUESTION please."}
CONTENT, REASONING = "Let me look.", "The user wants it."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where."},
                    "text": {"type": "string", "description": "What."},
                    "count": {"type": "integer", "description": "How often."},
                    "exact": {"type": "boolean", "description": "How."},
                    "ratio": {"type": "number", "description": "How much."},
                    "options": {"type": "object", "description": "More."},
                    "tags": {"type": "array", "description": "Tags.", "items": {"type": "string"}},
                },
                "required": ["path", "text"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": [],
            },
        },
    },
]
SIMPLE: Called = ("write_file", {"path": "/tmp/a.txt", "text": "hello", "count": 3})
HARD: Called = (
    "write_file",
    {
        "path": "/tmp/a b.txt",
        "text": 'def f(x):\n    """It\'s <b> & "x" \\n"""\n\treturn {"a": [1]}\n# Łódź 日本 \U0001f600 }\n',
        "count": -3,
        "exact": True,
        "ratio": 0.5,
        "options": {"deep": {"on": False, "n": None}, "list": [1, 'two\n"3"', {"x": "y"}]},
        "tags": ["a", "b c"],
    },
)
TIME: Called = ("get_time", {"city": "Paris"})
EMPTY: Called = ("get_time", {})
# What ends a turn, or the output, in one family or another.
_ENDS = (
    "<EOS>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eom|>", "<|end|>", "<|eot|>", "<|call|>", "<|calls|>",
    "<|observation|>", "<|user|>", "<turn|>", "<end_of_turn>", "<|tool_response>", "<start_function_response>", "</s>",
    "<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<|end_of_text|>", "<seed:eos>", "[|endofturn|]", "[e~[", "\n<sep>",
    "<|end_of_msg|>", "<|message_sep|>", "<end_of_sentence>", "<SPECIAL_12>", "<|assistant_end|>", "<|tools_suffix|>",
    "</assistant>", "<|eos|>", "<|im_assistant_end|>", "<|role_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5chy_eos:opensource\uff5c>",
)  # fmt: skip


class Turn(NamedTuple):
    """What a model would write, and whether its prompt had opened the reasoning."""

    text: str
    reasoning_open: bool


class NotComparable(Exception):
    """The template writes histories in a way that says nothing of what the model writes; the message tells how."""


def model_of(template: str, facts: dict[str, str | bool | int]) -> Model:
    """A model with this template, and a tokenizer of no family."""
    bundle = TokenizerBundle(
        call=0, hash="t", tokenizer_json=(model_path() / "tokenizer.json").read_bytes(), eos_token_ids=[0],
        chat_template=template, facts=facts, special_tokens={"bos_token": "<BOS>", "eos_token": "<EOS>"},
    )  # fmt: skip
    limits = Limits(2**24, 10**6, 10**6, 64, 64, 64)
    return Model(ModelCard("m", 1000, 10**6, [0], "t", 0), limits, Tokenizer(bundle))


def prompt_text(model: Model, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """The text of a prompt, as the front-end makes it. Raises its 400."""
    prompt = encode_chat(model, list(messages), tools, {})
    return model.tokenizer.decode(prompt.tokens, skip_special_tokens=False)


def assistant(calls: Sequence[Called] = (), content: str = "", reasoning: str = "") -> Message:
    """A turn of the assistant."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{place:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ]
    return message


def results(calls: Sequence[Called]) -> list[Message]:
    """What the tools answered."""
    return [
        {"role": "tool", "tool_call_id": f"call{place:05d}", "name": name, "content": f"RESULT-{place}"}
        for place, (name, _) in enumerate(calls)
    ]


def turn_of(model: Model, turn: Message, calls: Sequence[Called]) -> Turn:
    """What the template writes for a turn with these calls. Raises `NotComparable`."""
    word = str(USER["content"])
    prompt = prompt_text(model, [SYSTEM, USER], TOOLS)
    whole = prompt_text(model, [SYSTEM, USER, turn, *results(calls)], TOOLS)
    prompt, whole = prompt[prompt.rfind(word) :], whole[whole.rfind(word) :]
    differ = (place for place, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    same = next(differ, len(prompt))
    within = prompt.rfind("<", 0, same)
    if same < len(prompt) and prompt.rfind(">", 0, same) < within and same - within < 30:
        same = within
    start, end = model.markers.think_start, model.markers.think_end
    rest, text = prompt[same:], whole[same:].partition("RESULT-0")[0]
    if rest.replace(start, "").replace(end, "").strip() if start else rest.strip():
        raise NotComparable(f"the history does not go on from the prompt, which ends {rest[-40:]!r}")
    at = 0
    for place, (name, _) in enumerate(calls):
        found = text.find(name, at)
        if found < 0 and not place:
            raise NotComparable("the history has no calls")
        at = max(at, found + len(name))
    places = [place for mark in _ENDS if (place := text.find(mark, at)) >= 0]
    answer = text[: min(places, default=len(text))]
    open_ = bool(start) and prompt[:same].rfind(start) > prompt[:same].rfind(end)
    if start and rest.lstrip().startswith(start) and end in answer:
        open_ = start not in answer or answer.find(end) < answer.find(start)
    return Turn(answer, open_ and end in answer)


def read(model: Model, turn: Turn) -> tuple[str, str, list[Called]]:
    """Reasoning, content and calls, as the front-end tells them, the same however the text is cut."""
    told = [_told(model, turn, pieces) for pieces in _cuts()]
    assert all(each == told[0] for each in told), "what is told depends on how the text is cut"
    return told[0]


def _cuts() -> Iterator[Callable[[str], list[str]]]:
    yield lambda text: [text]
    yield list
    for seed in range(6):
        yield lambda text, seed=seed: _pieces(text, random.Random(seed))  # type: ignore[misc]


def _pieces(text: str, chance: random.Random) -> list[str]:
    pieces = []
    while text:
        length = chance.choice((1, 2, 3, 5, 8))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def _told(model: Model, turn: Turn, cut: Callable[[str], list[str]]) -> tuple[str, str, list[Called]]:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    splitter = make_splitter(model.markers, reasoning_open=turn.reasoning_open, tools=schemas)
    assert splitter is not None
    deltas = [delta for piece in cut(turn.text) for delta in splitter.feed(piece)] + splitter.finish()

    def text(kind: str) -> str:
        return "".join(delta.text for delta in deltas if delta.kind == kind).strip()

    return text("reasoning"), text("content"), list(_calls(deltas))


def _calls(deltas: Sequence[Delta]) -> Iterator[Called]:
    name, written = "", ""
    for delta in deltas:
        if delta.kind == "call":
            yield delta.name, json.loads(delta.text)
        elif delta.kind == "call_start":
            name, written = delta.name, ""
        elif delta.kind == "call_text":
            written += delta.text
        elif delta.kind == "call_end":
            yield name, json.loads(written)
