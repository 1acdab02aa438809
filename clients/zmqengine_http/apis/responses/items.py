"""The output items of a response while they are generated.

Reasoning travels in `encrypted_content`, the one field of a reasoning item that every client sends back. It
is not secret and not stored here: it is the text itself, compressed.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib

from zmqengine_http.apis.openai_api.freeform import freeform_input
from zmqengine_http.apis.responses.tools import ToolName


class MessageItem:
    """A message with the text of the output."""

    kind = "message"

    def __init__(self) -> None:
        self.id = f"msg_{secrets.token_hex(16)}"
        self.texts: list[str] = []

    def part(self) -> dict[str, object]:
        """The item's one content part."""
        return {"type": "output_text", "text": "".join(self.texts), "annotations": [], "logprobs": []}

    def document(self, status: str) -> dict[str, object]:
        """The item; in progress it has no parts yet."""
        content = [] if status == "in_progress" else [self.part()]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ReasoningItem:
    """Reasoning, as a summary or as content; `packed` adds it as `encrypted_content`, for clients to send
    back."""

    kind = "reasoning"

    def __init__(self, *, summary: bool, packed: bool) -> None:
        self.id = f"rs_{secrets.token_hex(16)}"
        self.texts: list[str] = []
        self.summary = summary
        self._packed = packed

    def part(self) -> dict[str, object]:
        """The item's one part, of the summary or of the content."""
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": "".join(self.texts)}

    def document(self, status: str) -> dict[str, object]:
        """The item; in progress it has no parts yet."""
        parts = [] if status == "in_progress" else [self.part()]
        document: dict[str, object] = {"id": self.id, "type": "reasoning", "status": status}
        document["summary"] = parts if self.summary else []
        if not self.summary:
            document["content"] = parts
        if self._packed:
            document["encrypted_content"] = pack("".join(self.texts)) if parts else ""
        return document


class CallItem:
    """A call of a function or of a freeform tool."""

    kind = "call"

    def __init__(self, call_id: str, tool: ToolName) -> None:
        self.custom = tool.kind == "custom"
        self.id = f"{'ctc' if self.custom else 'fc'}_{secrets.token_hex(16)}"
        self.texts: list[str] = []
        self._call_id = call_id
        self._tool = tool

    @property
    def text(self) -> str:
        """The JSON arguments of a function, or the input of a freeform tool."""
        text = "".join(self.texts)
        return freeform_input(text) if self.custom else text

    def document(self, status: str) -> dict[str, object]:
        """The item as JSON; without arguments while in progress."""
        document: dict[str, object] = {
            "id": self.id, "type": "custom_tool_call" if self.custom else "function_call", "status": status,
            "call_id": self._call_id, "name": self._tool.name,
        }  # fmt: skip
        if self._tool.namespace:
            document["namespace"] = self._tool.namespace
        document["input" if self.custom else "arguments"] = "" if status == "in_progress" else self.text
        return document


OutputItem = MessageItem | ReasoningItem | CallItem


_MARK = "zmqr1."
_CHARS_MAX = 1024 * 1024


def pack(reasoning: str) -> str:
    """Compress reasoning to one ASCII word."""
    return _MARK + base64.urlsafe_b64encode(zlib.compress(reasoning.encode("utf-8", "replace"), 1)).decode()


def unpack(packed: str) -> str | None:
    """The reasoning, or None for text that `pack` did not make."""
    if not packed.startswith(_MARK):
        return None
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(packed[len(_MARK) :], b"-_", validate=True), _CHARS_MAX)
    except (binascii.Error, zlib.error, ValueError):
        return None
    return data.decode("utf-8", "ignore")
