"""The body of POST /v1/chat/completions, and its messages and tools as chat templates read them.

Nulls inside messages are dropped first: client libraries send every optional key of a message back as null.
Unknown keys inside messages and tools are ignored: keys that another server put into its response come back
with the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from zmqengine.protocol.messages import LogprobCount, MaxTokens
from zmqengine_http.apis.openai_api.generation_request import (
    GENERATION_FIELDS,
    GenerationRequest,
    check_generation,
)
from zmqengine_http.generating.constraints import check_constraints
from zmqengine_http.serving.body import Body, refused, without_nulls
from zmqengine_http.serving.errors import bad_field

# --- messages and tools ------------------------------------------------------------------------------------


class _Part(Struct, frozen=True, tag_field="type"):
    """A part of a message's content."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text."""

    text: str


class RefusalPart(_Part, frozen=True, tag="refusal"):
    """An assistant's refusal; read as text."""

    refusal: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class CalledFunction(Struct, frozen=True):
    """Name and JSON arguments of a call; some clients send the arguments as an object instead of a string."""

    name: str
    arguments: str | dict[str, object]


class ChatToolCall(Struct, frozen=True):
    """A tool call of an earlier assistant message."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class _Message(Struct, frozen=True, tag_field="role"):
    """One message of a chat."""


class SystemMessage(_Message, frozen=True, tag="system"):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """Instructions; `system` for chat templates that do not know this role."""

    content: Content
    name: str | None = None


class UserMessage(_Message, frozen=True, tag="user"):
    """A message of the user."""

    content: Content
    name: str | None = None


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """A message or tool calls of the model. `reasoning_content` goes to chat templates that read it.

    `reasoning` is another server's name for `reasoning_content`.
    """

    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    tool_calls: list[ChatToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[object] | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """The result of a tool call."""

    content: Content
    tool_call_id: str = ""
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Prediction(Struct, frozen=True):
    """Text that the output may resemble, such as a file before an edit; its tokens are verified as draft
    tokens."""

    content: Content
    type: Literal["content"]


class FunctionDefinition(Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True):
    """A tool that the model may call."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


# --- the body ----------------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=1024)] = field(default_factory=list)
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, object] = field(default_factory=dict)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    prediction: Prediction | None = None


def _prepare(body: dict[str, object]) -> None:
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [without_nulls(message) for message in messages]


def _check(request: ChatRequest) -> None:
    check_generation(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_field("max_tokens", "max_completion_tokens is given too, with another value")
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    check_constraints(request.tool_choice, request.response_format)


CHAT_BODY = Body(
    ChatRequest,
    (
        *GENERATION_FIELDS,
        refused("functions", "use tools", []),
        refused("function_call", "use tool_choice", "none", "auto"),
        refused("modalities", "text only", ["text"]),
        refused("audio", "text only"),
        refused("web_search_options"),
        refused("moderation"),
        refused("verbosity", "", "medium"),
    ),
    prepare=_prepare,
    check=_check,
)

# --- as chat templates read it -----------------------------------------------------------------------------


def chat_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages with text content and the arguments of calls as objects."""
    return [_template_message(message) for message in messages]


def chat_template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, object]]:
    """The tools as plain dictionaries."""
    return [msgspec.to_builtins(tool) for tool in tools]


def content_text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """The text of a message's content, its parts concatenated."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _template_message(message: ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = {
        key: value
        for key, value in msgspec.to_builtins(message).items()
        if value is not None and key not in ("annotations", "reasoning")
    }
    plain["content"] = content_text(message.content)
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


def _arguments(text: str | dict[str, object]) -> object:
    if isinstance(text, dict):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
