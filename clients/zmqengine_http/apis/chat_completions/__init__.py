"""POST /v1/chat/completions: a chat in OpenAI's words."""

from __future__ import annotations

import secrets

import msgspec

from zmqengine_http.apis.chat_completions.conversation import text_of, to_conversation
from zmqengine_http.apis.chat_completions.request import CHAT_BODY, ChatRequest
from zmqengine_http.apis.chat_completions.writer import ChatWriter
from zmqengine_http.endpoint import post
from zmqengine_http.generating.chat import Chat, answer_chat
from zmqengine_http.generating.generation import Generation
from zmqengine_http.service import Service
from zmqengine_http.serving.exchange import Exchange


async def chat_completions(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    """Translate, generate, and answer in OpenAI's words."""
    model = service.pool.model(request.model)
    conversation = to_conversation(request.messages, request.tools, request.chat_template_kwargs)
    options = request.options(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    if request.prediction is not None:
        prediction = await service.tokenizing.prediction(
            exchange.id, exchange.body_bytes, model, text_of(request.prediction.content)
        )
        options = msgspec.structs.replace(options, prediction=prediction)
    chat = Chat(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        messages=conversation.messages,
        tools=conversation.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        effort=request.reasoning_effort,
        variables=conversation.variables,
        options=options,
    )

    def writer(generation: Generation) -> ChatWriter:
        return ChatWriter(generation, request.model or model.card.name, include_usage=request.include_usage)

    await answer_chat(service, exchange, chat, writer, stream=request.stream)


ENDPOINTS = (post("/v1/chat/completions", CHAT_BODY, chat_completions, "Answer a chat", streams=True),)
