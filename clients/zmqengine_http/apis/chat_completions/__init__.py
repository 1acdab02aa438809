"""POST /v1/chat/completions: OpenAI's chat API."""

from __future__ import annotations

import secrets

import msgspec

from zmqengine_http.apis.chat_completions.request import (
    CHAT_BODY,
    ChatRequest,
    chat_template_messages,
    chat_template_tools,
    content_text,
)
from zmqengine_http.apis.chat_completions.writer import ChatWriter
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.chat import Chat, answer_chat
from zmqengine_http.generating.generation import Generation
from zmqengine_http.serving.exchange import Exchange


async def chat_completions(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    """Translate the request to a `Chat`, generate, and respond in OpenAI's format."""
    model = service.pool.model(request.model)
    options = request.options(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    if request.prediction is not None:
        prediction = await service.tokenizing.prediction(
            exchange.id, exchange.body_bytes, model, content_text(request.prediction.content)
        )
        options = msgspec.structs.replace(options, prediction=prediction)
    chat = Chat(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        messages=chat_template_messages(request.messages),
        tools=chat_template_tools(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        effort=request.reasoning_effort,
        variables=request.chat_template_kwargs,
        options=options,
    )

    def writer(generation: Generation) -> ChatWriter:
        return ChatWriter(generation, request.model or model.card.name, include_usage=request.include_usage)

    await answer_chat(service, exchange, chat, writer, stream=request.stream)


ENDPOINTS = (post("/v1/chat/completions", CHAT_BODY, chat_completions, "Answer a chat", streams=True),)
