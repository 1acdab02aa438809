"""POST /tokenize and POST /detokenize: texts and chats to token ids, and token ids to text."""

from __future__ import annotations

from zmqengine_http.apis.chat_completions.request import chat_template_messages, chat_template_tools
from zmqengine_http.apis.tokenizing.request import (
    DETOKENIZE_BODY,
    TOKENIZE_BODY,
    DetokenizeRequest,
    TokenizeRequest,
)
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.generation import check_ids
from zmqengine_http.prompt.prompts import encode_chat, encode_text
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model


async def tokenize(service: Service, exchange: Exchange, request: TokenizeRequest) -> None:
    """Respond with the token ids of a text or a chat."""
    model = service.pool.model(request.model)
    tokens = await service.tokenizing.run(
        exchange.id, exchange.body_bytes, lambda: _tokenize(model, request), len
    )
    await exchange.send_json(
        {
            "count": len(tokens), "max_model_len": model.card.context_tokens, "tokens": tokens,
            "token_strs": [model.token_text(token) for token in tokens] if request.return_token_strs else None,
        }
    )  # fmt: skip


async def detokenize(service: Service, exchange: Exchange, request: DetokenizeRequest) -> None:
    """Respond with the text of token ids."""
    model = service.pool.model(request.model)
    check_ids("tokens", request.tokens, model)
    text = await service.tokenizing.run(
        exchange.id,
        exchange.body_bytes,
        lambda: model.tokenizer.decode(request.tokens, skip_special_tokens=False),
        len,
    )
    await exchange.send_json({"prompt": text})


def _tokenize(model: Model, request: TokenizeRequest) -> list[int]:
    if request.messages is not None:
        messages, tools = chat_template_messages(request.messages), chat_template_tools(request.tools)
        return encode_chat(model, messages, tools, request.chat_template_kwargs).tokens
    return encode_text(model, request.prompt or "", add_special_tokens=request.add_special_tokens)


ENDPOINTS = (
    post("/tokenize", TOKENIZE_BODY, tokenize, "The token ids of a text or a chat"),
    post("/detokenize", DETOKENIZE_BODY, detokenize, "The text of token ids"),
)
