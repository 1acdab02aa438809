"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from zmqengine.protocol.messages import LogprobCount, MaxTokens
from zmqengine_http.apis.chat_completions.messages import ChatMessage, Prediction, ToolDefinition
from zmqengine_http.apis.openai_api.generation_request import (
    GENERATION_FIELDS,
    GenerationRequest,
    check_generation,
)
from zmqengine_http.generating.constraints import check_constraints
from zmqengine_http.serving.body import Body, refused, without_nulls
from zmqengine_http.serving.errors import bad_field


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
