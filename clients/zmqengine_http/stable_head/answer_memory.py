"""What was generated around the tool calls of this front-end, for clients that send a part of it back.

Many clients drop the reasoning of a turn or shuffle the arguments of its calls before they send it back. A template
that renders the reasoning of the current chain of calls then writes another text than the one in the worker's cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

BYTES_MAX = 32 * 1024 * 1024
REASONING_CHARS_MAX = 256 * 1024


class _Made(msgspec.Struct, frozen=True):
    reasoning: str
    arguments: dict[str, object] | None
    bytes: int


class AnswerMemory:
    """Reasoning and arguments by the id of the call, which nobody can guess; the oldest go first.

    Safe to use from several threads.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._made: OrderedDict[str, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._made)

    def remember(self, call_id: str, reasoning: str, arguments: str) -> None:
        """Keep what was generated: the reasoning before the call, and its arguments as JSON."""
        if len(reasoning) > REASONING_CHARS_MAX:
            return
        try:
            parsed = msgspec.json.decode(arguments, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            parsed = None
        made = _Made(reasoning, parsed, len(reasoning) + 2 * len(arguments) + 400)
        with self._lock:
            old = self._made.pop(call_id, None)
            self._bytes += made.bytes - (old.bytes if old else 0)
            self._made[call_id] = made
            while self._bytes > self._bytes_max:
                self._bytes -= self._made.popitem(last=False)[1].bytes

    def restored(self, messages: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], int]:
        """The messages with what their calls are known to have had; how many got something back.

        Reasoning that a client sent is its own business; arguments are taken over only if they say the same.
        """
        restored, changed = [], 0
        for message in messages:
            calls = message.get("tool_calls")
            new = self._with_reasoning(message, calls) if isinstance(calls, list) and calls else message
            if new is not message:
                changed += 1
            restored.append(new)
        return restored, changed

    def _with_reasoning(self, message: dict[str, object], calls: list[object]) -> dict[str, object]:
        made = [self._find(call) for call in calls]
        new = message
        reasoning = next((each.reasoning for each in made if each and each.reasoning), "")
        if reasoning and not message.get("reasoning_content"):
            new = {**new, "reasoning_content": reasoning}
        ordered = [_with_order(call, each) for call, each in zip(calls, made, strict=True)]
        if any(after is not before for after, before in zip(ordered, calls, strict=True)):
            new = {**new, "tool_calls": ordered}
        return new

    def _find(self, call: object) -> _Made | None:
        if not isinstance(call, dict):
            return None
        with self._lock:
            made = self._made.get(call.get("id", ""))
            if made is not None:
                self._made.move_to_end(call["id"])
        return made


def _with_order(call: object, made: _Made | None) -> object:
    """The call with its arguments in the order they were generated in."""
    if made is None or made.arguments is None or not isinstance(call, dict):
        return call
    function = call.get("function")
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or given != made.arguments or _same_order(given, made.arguments):
        return call
    return {**call, "function": {**function, "arguments": made.arguments}}


def _same_order(one: object, other: object) -> bool:
    """Whether equal values have their keys in the same order."""
    return msgspec.json.encode(one) == msgspec.json.encode(other)
