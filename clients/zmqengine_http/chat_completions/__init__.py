"""POST /v1/chat/completions: a chat in OpenAI's words."""

from __future__ import annotations

import functools
import secrets

from zmqengine_http.chat_completions.conversation import to_conversation
from zmqengine_http.chat_completions.request import CHAT_BODY, ChatRequest
from zmqengine_http.chat_completions.writer import ChatWriter
from zmqengine_http.endpoint import post
from zmqengine_http.exchange import Exchange
from zmqengine_http.generation import Generation, answer_generation
from zmqengine_http.prompts import Prompt
from zmqengine_http.reasoning import reasoning_variables
from zmqengine_http.service import Service
from zmqengine_http.tool_calls import TextSplitter, make_splitter
from zmqengine_http.worker import Model


async def answer_chat(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    """Translate, generate, and answer in OpenAI's words."""
    model = service.pool.model(request.model)
    tools = request.tools if request.tool_choice != "none" else []
    variables = request.chat_template_kwargs | reasoning_variables(model, request.reasoning_effort)
    conversation = to_conversation(request.messages, tools, variables)
    prompt = await service.tokenizing.chat(exchange.id, exchange.body_bytes, model, conversation)
    generation = Generation(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        prompts=[prompt],
        prompt_param="messages",
        sampling=request.to_sampling(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ),
        splitter=functools.partial(_splitter, model, request),
        first_call_only=not request.parallel_tool_calls,
    )
    name = request.model or model.card.name
    writer = ChatWriter(generation, name, include_usage=request.include_usage)
    await answer_generation(service, exchange, generation, writer, stream=request.stream)


def _splitter(model: Model, request: ChatRequest, prompt: Prompt) -> TextSplitter | None:
    tools = request.tools if request.tool_choice == "auto" else []
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return make_splitter(model.markers, reasoning_open=prompt.reasoning_open, tools=schemas)


ENDPOINTS = (post("/v1/chat/completions", CHAT_BODY, answer_chat, "Answer a chat", streams=True),)
