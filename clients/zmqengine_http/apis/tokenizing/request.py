"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.sampling_params import TokenId
from zmqengine_http.apis.chat_completions.request import ChatMessage, ToolDefinition
from zmqengine_http.serving.body import Body, without_nulls
from zmqengine_http.serving.errors import bad_field


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ToolDefinition] = []
    chat_template_kwargs: dict[str, object] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def _prepare(body: dict[str, object]) -> None:
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [without_nulls(message) for message in messages]


def _check(request: TokenizeRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")


TOKENIZE_BODY = Body(TokenizeRequest, prepare=_prepare, check=_check)
DETOKENIZE_BODY = Body(DetokenizeRequest)
