"""Translates the items of a Responses request to messages as chat templates read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from zmqengine_client.text.chats.history import history_arguments
from zmqengine_http.apis.responses.items import unpack
from zmqengine_http.apis.responses.request import Item, ResponsesPart, ResponsesRequest
from zmqengine_http.apis.responses.tools import flat_name
from zmqengine_http.apis.unread import newest_question, refusal, unread_text
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.errors import ApiError, bad_field

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_READ = frozenset(("message", "reasoning", "function_call", "custom_tool_call", "item_reference", *_OUTPUTS))
"""Types of items that are read; others are skipped."""
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class InputItems:
    """The `messages` of a request, and the types of the items `skipped`.

    `earlier` are the items of the conversation before the request's own; `find` gives the item of an `item_reference`.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        find: Callable[[str], Item | None] = lambda id_: None,
        earlier: Sequence[Item] = (),
        pictures: Pictures | None = None,
    ) -> None:
        self._find = find
        self._pictures = pictures or Pictures()
        self.messages: list[dict[str, object]] = []
        self.skipped: list[str] = []
        self._turn: dict[str, object] | None = None
        self._referred_ids: set[str | None] = set()
        self._texts: list[tuple[dict[str, object], str, list[str]]] = []
        if request.instructions:
            self.messages.append({"role": "system", "content": request.instructions})
        items = [*earlier, *own_items(request)]
        newest = newest_question([_role(item) for item in items], tools=bool(request.tools))
        for index, item in enumerate(items):
            where = f"input[{index - len(earlier)}]"
            if index == len(items) - 1 and item.type.endswith("_output") and item.type not in _OUTPUTS:
                # An answer would be about something older.
                raise _unread(item, where, "the result of a tool of the server, of which there are none here")
            self._add(item, where, strict=index == newest)
        for turn, field, texts in self._texts:
            turn[field] = "".join(texts)

    def _add(self, item: Item, where: str, *, strict: bool = False) -> None:
        kind = item.type
        if kind == "message":
            self._message(item, where, strict=strict)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            self._call(item, where, history_arguments(item.arguments))
        elif kind == "custom_tool_call":
            self._call(item, where, {"input": item.input or ""})
        elif kind in _OUTPUTS:
            self._turn = None
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.call_id or "",
                    "content": _output(item, where, self._pictures),
                }
            )
        elif kind == "item_reference":
            self._add(self._referred(item, where), where)
        elif kind.startswith("input_"):
            raise _unread(item, where, "a part of a message: send it in the content of one")
        else:
            self.skipped.append(kind[:60])

    def _referred(self, item: Item, where: str) -> Item:
        # As OpenAI does: a short body must not ask for a long item many times.
        if item.id in self._referred_ids:
            raise bad_field(where, f"duplicate item {str(item.id)[:60]!r}: refer to each item once")
        self._referred_ids.add(item.id)
        referred = self._find(item.id or "")
        if referred is None:
            raise ApiError(
                400,
                f"{where}: there is no item {str(item.id)[:60]!r} here, only the latest ones are kept and none of a "
                "request that said store false; send the item itself (in most clients: set store to false)",
                param=where,
                code="unsupported_value",
            )
        return referred

    def _message(self, item: Item, where: str, *, strict: bool) -> None:
        text = _text(item.content, f"{where}.content", pictures=self._pictures, strict=strict)
        if item.role == "assistant":
            self._append("content", text)
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
        self._append("reasoning_content", text)

    def _call(self, item: Item, where: str, arguments: object) -> None:
        if not item.name or not item.call_id:
            raise bad_field(where, f"a {item.type} has a name and a call_id")
        name = flat_name(item.name, item.namespace)
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(
            {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def _append(self, field: str, text: str) -> None:
        """Add to a text of the open turn; joined once at the end, or each item would copy those before it."""
        turn = self._assistant()
        if not text:
            return
        if not (self._texts and self._texts[-1][0] is turn and self._texts[-1][1] == field):
            self._texts.append((turn, field, [str(turn.get(field, ""))]))
        self._texts[-1][2].append(text)
        turn[field] = text

    def _assistant(self) -> dict[str, object]:
        """The open assistant turn, started if there is none; items join it until a message of another
        role."""
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


def own_items(request: ResponsesRequest) -> list[Item]:
    """The items that the request itself brings."""
    if isinstance(request.input, str):
        return [Item(role="user", content=request.input)]
    return request.input


def known_items(request: ResponsesRequest) -> list[Item]:
    """The items of the request that are read, which are all that a later one needs."""
    return [item for item in own_items(request) if item.type in _READ]


def _output(item: Item, where: str, pictures: Pictures) -> str:
    if isinstance(item.output, dict):
        # Older versions of Codex wrap the text: {"content": ..., "success": ...}.
        return _text(item.output.get("content"), f"{where}.output", pictures=pictures)
    return _text(item.output, f"{where}.output", separator="\n", pictures=pictures)


def _text(
    content: object,
    where: str,
    separator: str = "",
    *,
    pictures: Pictures | None = None,
    strict: bool = False,
) -> str:
    """The text of a content field. A part without text becomes a note, or with `strict` a 400."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        parts = msgspec.convert(content, list[ResponsesPart])
    except msgspec.ValidationError:
        raise bad_field(where, "a text or a list of parts") from None
    seen = pictures or Pictures()
    texts = [_part_text(part, f"{where}[{index}]", seen, strict=strict) for index, part in enumerate(parts)]
    return separator.join(texts)


def _part_text(part: ResponsesPart, where: str, pictures: Pictures, *, strict: bool) -> str:
    if part.type in _TEXT_PARTS:
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    if part.type == "input_image" and pictures.sees:
        if part.image_url is None:
            raise bad_field(f"{where}.image_url", "no files are stored here: send the image as a data URL")
        return pictures.add(part.image_url, f"{where}.image_url")
    if strict:
        raise refusal(part.type, where, pictures)
    return unread_text(part.type, part.filename)


def _unread(item: Item, where: str, why: str) -> ApiError:
    return ApiError(
        400, f"{where}: {item.type[:60]!r} is {why}", param=f"{where}.type", code="unsupported_value"
    )


def _role(item: Item) -> str:
    """The role of an item for `newest_question`: calls are the assistant's, their outputs the tool's."""
    if item.type == "message":
        return item.role or ""
    return "tool" if item.type.endswith("_output") else "assistant"


def skipped_facts(items: Sequence[str], tools: Sequence[str]) -> dict[str, object]:
    """Numbers of skipped items and tools, as fields of the log line: their types are the caller's text."""
    numbers = {"items_skipped": len(items), "tools_skipped": len(tools)}
    return {name: number for name, number in numbers.items() if number}
