"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

Clients of this API are often newer than servers: unknown keys in blocks and tools are ignored, and so are
server-side tools. Source: https://docs.anthropic.com/en/api/messages and the requests of Claude Code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from zmqengine.protocol.messages import TOKEN_ID_MAX, CacheScope, MaxTokens, PrefillKeep, TokenIndex
from zmqengine_http.serving.body import Body, ignored, reported


class Block(Struct, frozen=True):
    """A content block of any type; only the fields of its type are set."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: object = None
    tool_use_id: str | None = None
    content: object = None
    is_error: bool | None = None
    thinking: str | None = None
    source: object = None
    title: str | None = None
    tool_name: str | None = None


Content = str | list[Block]
StopSequence = Annotated[str, Meta(max_length=1000)]


class AnthropicMessage(Struct, frozen=True):
    """One message. The role `system` is not in Anthropic's documentation, but Claude Code sends it."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Struct, frozen=True):
    """A tool of the client, or a server-side tool if `type` is given and not `custom`.

    `defer_loading`: the prompt shows the tool where a `tool_reference` names it, not in its head.
    """

    name: str = ""
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct, frozen=True):
    """Choice of the tools that may or must be called; `name` belongs to the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Whether the model should reason."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: TokenIndex | None = None


class OutputConfig(Struct, frozen=True):
    """Reasoning effort and output format."""

    effort: str | None = None
    format: dict[str, object] | None = None


class Metadata(Struct, frozen=True):
    """Request metadata; Claude Code's `user_id` is JSON with its session id."""

    user_id: str | None = None


class CountRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens: the fields that affect the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: Content | None = None
    tools: list[AnthropicTool] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, object] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: MaxTokens
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)] | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=16)] = field(default_factory=list)
    stream: bool = False
    metadata: Metadata | None = None
    cache_scope: CacheScope | None = None
    pin: bool = False
    prefill_keep: PrefillKeep | None = None


_OF_ANTHROPIC = (
    ignored("cache_control", "the worker caches what it can"),
    reported("container", "tools of the server are left out"),
    reported("context_management", "the client's messages are taken as they are"),
    reported("mcp_servers", "tools of the server are left out"),
    reported("service_tier", "there is one tier", "auto"),
    reported("inference_geo", "it runs here"),
    reported("speed", "there is one speed"),
    ignored("betas", "any is taken"),
    ignored("workspace_id", "for the caller's own records"),
    ignored("user_profile_id", "for the caller's own records"),
    reported("diagnostics", "there are none"),
)
MESSAGES_BODY = Body(MessagesRequest, _OF_ANTHROPIC, unknown_ignored=True)
COUNT_BODY = Body(CountRequest, _OF_ANTHROPIC, unknown_ignored=True)
