"""Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from zmqengine_http.apis.anthropic.conversation import to_chat
from zmqengine_http.apis.anthropic.errors import OVERLOADED_STATUS, anthropic_error
from zmqengine_http.apis.anthropic.request import COUNT_BODY, MESSAGES_BODY, CountRequest, MessagesRequest
from zmqengine_http.apis.anthropic.writer import MessagesWriter
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.chat import answer_chat, render
from zmqengine_http.generating.generation import Generation
from zmqengine_http.serving.exchange import Exchange


async def messages(service: Service, exchange: Exchange, request: MessagesRequest) -> None:
    """POST /v1/messages: translate the request to a `Chat`, generate, and respond in Anthropic's format."""

    def writer(generation: Generation) -> MessagesWriter:
        return MessagesWriter(generation.id, request.model, len(generation.prompts[0].tokens))

    chat = to_chat(service.pool.model(request.model), request)
    await answer_chat(service, exchange, chat, writer, stream=request.stream)


async def count_tokens(service: Service, exchange: Exchange, request: CountRequest) -> None:
    """POST /v1/messages/count_tokens: the number of tokens in the prompt of these messages."""
    prompt = await render(service, exchange, to_chat(service.pool.model(request.model), request))
    await exchange.send_json({"input_tokens": len(prompt.tokens)})


ENDPOINTS = (
    post(
        "/v1/messages", MESSAGES_BODY, messages, "Answer a chat, in Anthropic's words",
        streams=True, error_shape=anthropic_error, busy_status=OVERLOADED_STATUS,
    ),
    post(
        "/v1/messages/count_tokens", COUNT_BODY, count_tokens, "How many tokens such a chat has",
        error_shape=anthropic_error, busy_status=OVERLOADED_STATUS,
    ),
)  # fmt: skip
