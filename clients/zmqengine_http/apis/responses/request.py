"""The body of POST /v1/responses.

Items and tools are parsed leniently: Codex adds types with every release, and items of server-side tools mean
nothing to this model. Source: https://platform.openai.com/docs/api-reference/responses/create and codex-rs.
"""

from __future__ import annotations

from msgspec import Struct, field

from zmqengine.protocol.messages import CacheScope, MaxTokens, PrefillKeep, TokenIndex
from zmqengine_http.apis.openai_api.generation_request import Temperature, TopP
from zmqengine_http.serving.body import Body, ignored, refused, reported


class ResponsesPart(Struct, frozen=True):
    """A content part of a message or an output, of any type."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    filename: str | None = None
    image_url: object = None


class Item(Struct, frozen=True):
    """An input item of any type; only the fields of its type are set. Without a type it is a message."""

    type: str = "message"
    role: str | None = None
    content: object = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: object = None
    summary: object = None
    encrypted_content: str | None = None


class ResponsesTool(Struct, frozen=True):
    """A function, a freeform tool (`custom`), a namespace of functions, or a server-side tool."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: object = None
    tools: list[object] | None = None


class Reasoning(Struct, frozen=True):
    """Reasoning effort, OpenRouter's bound on its tokens, and whether a summary of the reasoning is wanted."""

    effort: str | None = None
    max_tokens: TokenIndex | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Struct, frozen=True):
    """The format of the output text; `verbosity`, a hint like an effort, has no effect."""

    format: dict[str, object] | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | list[Item] = field(default_factory=list)
    instructions: str | None = None
    tools: list[ResponsesTool] = field(default_factory=list)
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] = field(default_factory=list)
    stream: bool = False
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    prompt_cache_key: str | None = None
    cache_scope: CacheScope | None = None
    pin: bool = False
    prefill_keep: PrefillKeep | None = None


RESPONSES_BODY = Body(
    ResponsesRequest,
    (
        refused("conversation", "send previous_response_id, or the whole conversation as input"),
        refused("prompt", "nothing is stored: send instructions and input"),
        refused("background", "", False),
        refused("background_options", "nothing runs in the background"),
        refused("image", "no images are made"),
        reported("access_programs", "there are none"),
        refused("top_logprobs", "", 0),
        reported("truncation", "a conversation that is too long is refused", "disabled"),
        reported("max_tool_calls", "it is for tools of the server"),
        ignored("metadata", "for the caller's own records"),
        ignored("client_metadata", "for the caller's own records"),
        ignored("user", "for the caller's own records"),
        ignored("safety_identifier", "for the caller's own records"),
        reported("service_tier", "there is one tier", "auto", "default"),
        ignored("prompt_cache_retention", "the worker decides"),
        ignored("prompt_cache_options", "the worker decides"),
        ignored("stream_options", "nothing is obfuscated"),
        reported("context_management", "the client's items are taken as they are"),
        reported("moderation", "there is none"),
    ),
)
