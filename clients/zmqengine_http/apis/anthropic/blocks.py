"""The text of content blocks."""

from __future__ import annotations

import msgspec

from zmqengine_http.apis.anthropic.deferred_tools import DeferredTools
from zmqengine_http.apis.anthropic.request import Block, Content
from zmqengine_http.apis.unread import refusal, unread_text
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.errors import bad_field


class BlockTexts:
    """The texts of the blocks of one request, read in order: a reference loads its tool from `deferred`.

    Every method raises a 400 that names a malformed block. A block without text becomes a note in its place, or
    with `strict` a 400.
    """

    def __init__(self, deferred: DeferredTools, pictures: Pictures | None = None) -> None:
        self._deferred = deferred
        self._pictures = pictures or Pictures()

    def result(self, block: Block, where: str) -> str:
        """The text of a `tool_result`."""
        text = self.joined(_blocks(block.content, f"{where}.content"), f"{where}.content", "\n")
        return f"Error: {text}" if block.is_error else text

    def joined(self, content: Content, where: str, separator: str, *, strict: bool = False) -> str:
        if isinstance(content, str):
            return content
        return separator.join(
            self.text(block, f"{where}[{index}]", strict=strict) for index, block in enumerate(content)
        )

    def text(self, block: Block, where: str, *, strict: bool = False) -> str:
        if block.type == "text":
            if block.text is None:
                raise bad_field(f"{where}.text", "a text block has a text")
            return block.text
        if block.type == "tool_reference":
            return self._deferred.text(block)
        if block.type == "search_result":
            inner = self._inner(block.content, f"{where}.content", strict=strict)
            return "\n".join(part for part in (block.title, str(block.source or ""), inner) if part)
        source = block.source
        if block.type == "document" and isinstance(source, dict):
            if source.get("type") == "text":
                return str(source.get("data", ""))
            if source.get("type") == "content":
                return self._inner(source.get("content"), f"{where}.source.content", strict=strict)
        if block.type == "image" and self._pictures.sees:
            return self._image(source, f"{where}.source")
        if strict:
            raise refusal(block.type, where, self._pictures)
        return unread_text(block.type, block.title)

    def _image(self, source: object, where: str) -> str:
        kind = source.get("type") if isinstance(source, dict) else None
        if kind == "base64" and isinstance(source, dict):
            return self._pictures.add(source.get("data"), f"{where}.data")
        if kind == "url" and isinstance(source, dict):
            return self._pictures.add(source.get("url"), f"{where}.url")
        raise bad_field(f"{where}.type", "the source of an image is base64 with its data, or a url")

    def _inner(self, content: object, where: str, *, strict: bool) -> str:
        return self.joined(_blocks(content, where), where, "\n", strict=strict)


def _blocks(content: object, where: str) -> Content:
    try:
        blocks: Content = msgspec.convert(content or "", Content)
    except msgspec.ValidationError:
        raise bad_field(where, "a text or a list of blocks") from None
    return blocks
