"""POST /tokenize and POST /detokenize: texts and chats to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.sampling_params import TokenId
from zmqengine_http.apis.chat_completions.request import (
    ChatMessage,
    ToolDefinition,
    chat_template_messages,
    chat_template_tools,
    check_types,
)
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.chat import Chat, render
from zmqengine_http.generating.generation import check_ids
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.prompt.prompts import encode_text
from zmqengine_http.serving.body import Body, without_nulls
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model


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


async def tokenize(service: Service, exchange: Exchange, request: TokenizeRequest) -> None:
    """Respond with the token ids of a text, or of a chat and its images."""
    model = service.pool.model(request.model)
    if request.messages is not None:
        tokens = (await render(service, exchange, _chat(exchange, model, request, request.messages))).tokens
    else:
        text, special = request.prompt or "", request.add_special_tokens
        tokens = await service.tokenizing.run(
            exchange.id,
            exchange.body_bytes,
            lambda: encode_text(model, text, add_special_tokens=special),
            len,
        )
    await exchange.send_json(
        {
            "count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens,
            "token_strs": [model.token_text(token) for token in tokens] if request.return_token_strs else None,
        }
    )  # fmt: skip


async def detokenize(service: Service, exchange: Exchange, request: DetokenizeRequest) -> None:
    """Respond with the text of token ids."""
    model = service.pool.model(request.model)
    if len(request.tokens) > model.context_tokens:
        raise bad_field("tokens", f"more than the model's context of {model.context_tokens} tokens")
    check_ids("tokens", request.tokens, model)
    text = await service.tokenizing.run(
        exchange.id,
        exchange.body_bytes,
        lambda: model.tokenizer.decode(request.tokens, skip_special_tokens=False),
        len,
    )
    await exchange.send_json({"prompt": text})


def _chat(exchange: Exchange, model: Model, request: TokenizeRequest, asked: Sequence[ChatMessage]) -> Chat:
    check_types(asked, request.tools)
    pictures = Pictures(model)
    return Chat(
        id=exchange.id,
        model=model,
        messages=chat_template_messages(asked, pictures, tools=bool(request.tools)),
        pictures=pictures.all,
        tools=chat_template_tools(request.tools),
        variables=request.chat_template_kwargs,
    )


ENDPOINTS = (
    post("/tokenize", TOKENIZE_BODY, tokenize, "The token ids of a text or a chat"),
    post("/detokenize", DETOKENIZE_BODY, detokenize, "The text of token ids"),
)
