"""Translates the items of a Responses request to messages as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine_http.apis.responses.items import ItemMemory, unpack
from zmqengine_http.apis.responses.request import Item, ResponsesPart, ResponsesRequest
from zmqengine_http.apis.responses.tools import flat_name
from zmqengine_http.serving.errors import ApiError, bad_field

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_IMAGES_AND_FILES = ("input_image", "input_file", "input_audio", "computer_screenshot")


class InputItems:
    """The `messages` of a request, and the types of the items `skipped`.

    `memory` resolves `item_reference` items.
    """

    def __init__(self, request: ResponsesRequest, memory: ItemMemory | None = None) -> None:
        self._memory = memory or ItemMemory()
        self.messages: list[dict[str, object]] = []
        self.skipped: list[str] = []
        self._turn: dict[str, object] | None = None
        if request.instructions:
            self.messages.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            self.messages.append({"role": "user", "content": request.input})
            return
        for place, item in enumerate(request.input):
            self._add(item, f"input[{place}]")

    def _add(self, item: Item, where: str) -> None:
        kind = item.type
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._call(item, where, _arguments(item.arguments or ""))
        elif kind == "custom_tool_call":
            self._call(item, where, {"input": item.input or ""})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._turn = None
            self.messages.append(
                {"role": "tool", "tool_call_id": item.call_id or "", "content": _output(item, where)}
            )
        elif kind == "item_reference":
            self._add(self._referred(item, where), where)
        else:
            self.skipped.append(kind[:60])

    def _referred(self, item: Item, where: str) -> Item:
        found = self._memory.find(item.id or "")
        if found is None:
            raise ApiError(
                400,
                f"{where}: there is no item {str(item.id)[:60]!r} here, only the latest ones are kept and none of a "
                "request that said store false; send the item itself (in most clients: set store to false)",
                param=where,
                code="unsupported_value",
            )
        return found

    def _message(self, item: Item, where: str) -> None:
        text = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            turn = self._assistant()
            turn["content"] = f"{turn['content']}{text}"
        elif item.role in ("user", "system", "developer"):
            self._turn = None
            self.messages.append({"role": item.role, "content": text})
        else:
            raise bad_field(f"{where}.role", "one of user, assistant, system and developer")

    def _reasoning(self, item: Item, where: str) -> None:
        text = unpack(item.encrypted_content or "")
        if text is None:
            text = _text(item.content, f"{where}.content") or _text(item.summary, f"{where}.summary")
        if self._turn is not None and (self._turn["content"] or "tool_calls" in self._turn):
            # Reasoning precedes its content and calls, so this belongs to the next turn.
            self._turn = None
        turn = self._assistant()
        if text:
            turn["reasoning_content"] = f"{turn.get('reasoning_content', '')}{text}"

    def _call(self, item: Item, where: str, arguments: object) -> None:
        if not item.name or not item.call_id:
            raise bad_field(where, f"a {item.type} has a name and a call_id")
        name = flat_name(item.name, item.namespace)
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(
            {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def _assistant(self) -> dict[str, object]:
        """The open assistant turn, started if there is none; items join it until a message of another
        role."""
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


def _output(item: Item, where: str) -> str:
    if isinstance(item.output, dict):
        # Older versions of Codex wrap the text: {"content": ..., "success": ...}.
        return _text(item.output.get("content"), f"{where}.output")
    return _text(item.output, f"{where}.output", separator="\n")


def _text(content: object, where: str, separator: str = "") -> str:
    """The text of a content field. Raises a 400 for a part without text."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        parts = msgspec.convert(content, list[ResponsesPart])
    except msgspec.ValidationError:
        raise bad_field(where, "a text or a list of parts") from None
    return separator.join(_part_text(part, f"{where}[{place}]") for place, part in enumerate(parts))


def _part_text(part: ResponsesPart, where: str) -> str:
    if part.type in _TEXT_PARTS:
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    reason = "images and files cannot be read by this model" if part.type in _IMAGES_AND_FILES else "unknown"
    raise ApiError(400, f"{where}: {part.type[:40]!r}: {reason}", param=where, code="unsupported_value")


def _arguments(text: str) -> object:
    """The arguments as an object if they parse as one, else the text; templates take both."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return text


def skipped_facts(items: Sequence[str], tools: Sequence[str]) -> dict[str, object]:
    """Skipped types of items and tools, as fields of the log line."""
    facts: dict[str, object] = {}
    if items:
        facts["items_skipped"] = sorted(set(items))
    if tools:
        facts["tools_skipped"] = sorted(set(tools))
    return facts
