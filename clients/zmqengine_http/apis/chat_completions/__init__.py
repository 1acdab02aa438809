"""POST /v1/chat/completions: OpenAI's chat API."""

from __future__ import annotations

import secrets

import msgspec

from zmqengine_http.apis.chat_completions.request import (
    CHAT_BODY,
    ChatRequest,
    chat_template_messages,
    chat_template_tools,
    chat_tool_choice,
    content_text,
)
from zmqengine_http.apis.chat_completions.writer import ChatWriter
from zmqengine_http.apis.openai_api.generation_request import check_context
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.chat import Chat, ThinkingTokens, answer_chat
from zmqengine_http.generating.generation import Generation
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.exchange import Exchange


async def chat_completions(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    """Generate, and respond in OpenAI's format."""
    chat = await make_chat(service, exchange, request)

    def writer(generation: Generation) -> ChatWriter:
        name = request.model or chat.model.card.name
        custom = frozenset(tool.custom.name for tool in request.tools if tool.custom)
        return ChatWriter(
            generation,
            name,
            include_usage=request.include_usage,
            timings=request.timings_per_token,
            custom=custom,
        )

    await answer_chat(service, exchange, chat, writer, stream=request.stream)


async def make_chat(service: Service, exchange: Exchange, request: ChatRequest) -> Chat:
    model = service.pool.model(request.model)
    check_context(request.num_ctx, model)
    options = request.options(
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    if request.prediction is not None:
        text = content_text(request.prediction.content, "prediction", strict=True)
        prediction = await service.tokenizing.prediction(exchange.id, exchange.body_bytes, model, text)
        options = msgspec.structs.replace(options, prediction=prediction)
    offered = chat_tool_choice(request)
    pictures = Pictures(model)
    return Chat(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        messages=chat_template_messages(request.messages, pictures, tools=bool(request.tools)),
        pictures=pictures.all,
        tools=chat_template_tools(offered.tools),
        tool_choice=offered.choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        effort=request.reasoning_effort,
        thinking=None
        if request.thinking_max is None
        else ThinkingTokens(request.thinking_max, "thinking_max"),
        variables=request.chat_template_kwargs,
        options=options,
        continues=request.continues,
    )


ENDPOINTS = (post("/v1/chat/completions", CHAT_BODY, chat_completions, "Answer a chat", streams=True),)
