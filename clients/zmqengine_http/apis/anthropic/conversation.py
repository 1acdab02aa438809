"""From Anthropic's messages and tools to those that chat templates read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from zmqengine_http.apis.anthropic.request import Block, Content, CountRequest, Message, Tool
from zmqengine_http.serving.errors import ApiError, bad_field

_SERVER_SIDE = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction")
"""What only a server that runs tools itself has to do with; `..._tool_result` with another beginning too."""


def plain_messages(request: CountRequest) -> list[dict[str, object]]:
    """The conversation as chat templates read it. Raises a 400 that names what a text model cannot read."""
    plain: list[dict[str, object]] = []
    if request.system:
        plain.append({"role": "system", "content": _joined(request.system, "system", "\n\n")})
    for place, message in enumerate(request.messages):
        plain += _READERS[message.role](message, f"messages[{place}].content")
    return plain


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """The client's own tools in OpenAI's form, which templates read; the server's are left out."""
    plain: list[dict[str, object]] = []
    for tool in tools:
        if tool.type not in (None, "custom"):
            continue
        function: dict[str, object] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        if tool.strict:
            function["strict"] = True
        plain.append({"type": "function", "function": function})
    return plain


def _user(message: Message, where: str) -> list[dict[str, object]]:
    """Results first, as the API demands and templates expect, then what the user says."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results: list[dict[str, object]] = []
    texts: list[str] = []
    for place, block in enumerate(message.content):
        at = f"{where}[{place}]"
        if block.type == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block, at)}
            )
        elif not _is_server_side(block):
            texts.append(_text(block, at))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(message: Message, where: str) -> list[dict[str, object]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, object]] = []
    for place, block in enumerate(message.content):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{where}[{place}]"))
        elif block.type != "redacted_thinking" and not _is_server_side(block):
            texts.append(_text(block, f"{where}[{place}]"))
    plain: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        plain["reasoning_content"] = "".join(reasoning)
    if calls:
        plain["tool_calls"] = calls
    return [plain]


def _system(message: Message, where: str) -> list[dict[str, object]]:
    return [{"role": "system", "content": _joined(message.content, where, "\n")}]


_READERS: dict[str, Callable[[Message, str], list[dict[str, object]]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _call(block: Block, where: str) -> dict[str, object]:
    if not block.name:
        raise bad_field(f"{where}.name", "a tool_use block names its tool")
    if not isinstance(block.input, dict):
        raise bad_field(f"{where}.input", "the input of a tool_use block is an object")
    return {
        "id": block.id or "",
        "type": "function",
        "function": {"name": block.name, "arguments": block.input},
    }


def _result(block: Block, where: str) -> str:
    try:
        content = msgspec.convert(block.content or "", Content)
    except msgspec.ValidationError:
        raise bad_field(f"{where}.content", "a tool_result holds a text or a list of blocks") from None
    text = _joined(content, f"{where}.content", "\n")
    return f"Error: {text}" if block.is_error else text


def _joined(content: Content, where: str, separator: str) -> str:
    if isinstance(content, str):
        return content
    return separator.join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: Block, where: str) -> str:
    """The text of a block. Raises a 400 for one that has none."""
    if block.type == "text":
        if block.text is None:
            raise bad_field(f"{where}.text", "a text block has a text")
        return block.text
    if block.type == "tool_reference":
        return str(block.name or "")
    source = block.source
    if block.type == "document" and isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data", ""))
    raise ApiError(
        400,
        f"{where}: this model reads text only, it cannot take a block of type {block.type[:40]!r}",
        param=where,
        code="unsupported_value",
    )


def _is_server_side(block: Block) -> bool:
    kind = block.type
    return kind in _SERVER_SIDE or (kind.endswith("_tool_result") and kind != "tool_result")
