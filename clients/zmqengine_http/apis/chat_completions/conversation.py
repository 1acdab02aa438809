"""OpenAI's chat messages and tools as a conversation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine_http.apis.chat_completions.messages import (
    AssistantMessage,
    ChatMessage,
    RefusalPart,
    TextPart,
    ToolDefinition,
)
from zmqengine_http.prompt.prompts import Conversation


def to_conversation(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], variables: dict[str, object]
) -> Conversation:
    """The conversation, with text content and the arguments of calls as objects."""
    return Conversation(
        [_plain(message) for message in messages], [msgspec.to_builtins(tool) for tool in tools], variables
    )


def _plain(message: ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = {
        key: value
        for key, value in msgspec.to_builtins(message).items()
        if value is not None and key not in ("annotations", "reasoning")
    }
    plain["content"] = text_of(message.content)
    if isinstance(message, AssistantMessage) and message.reasoning and not message.reasoning_content:
        plain["reasoning_content"] = message.reasoning
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """The text of a message, whatever its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _arguments(text: str | dict[str, object]) -> object:
    if isinstance(text, dict):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
