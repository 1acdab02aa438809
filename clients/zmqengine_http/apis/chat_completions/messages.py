"""The messages and tools of a chat request.

Nulls are dropped before: client libraries send every optional key of a message back as null. Unknown keys are ignored:
what another server put into an answer comes back with the next request, and must not end the conversation.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType


class _Part(Struct, frozen=True, tag_field="type"):
    """A part of a message's content."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text."""

    text: str


class RefusalPart(_Part, frozen=True, tag="refusal"):
    """What an assistant said when it refused; read as text."""

    refusal: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class CalledFunction(Struct, frozen=True):
    """Name and JSON arguments of a call; an object stands for its JSON, as some clients keep it."""

    name: str
    arguments: str | dict[str, object]


class ToolCall(Struct, frozen=True):
    """A call that an assistant made earlier in the chat."""

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
    """What the user said."""

    content: Content
    name: str | None = None


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """What the model said or called. `reasoning_content` goes to chat templates that read it.

    `reasoning` is another server's name for it.
    """

    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[object] | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str = ""
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Prediction(Struct, frozen=True):
    """What the answer may be like, such as a file before a change: where it is right, tokens come sooner."""

    content: Content
    type: Literal["content"]


class FunctionDefinition(Struct, frozen=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True):
    """A tool the model may call."""

    function: FunctionDefinition
    type: Literal["function"] = "function"
