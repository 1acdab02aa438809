"""Anthropic's Messages API, as a translation to the one inner request."""

from __future__ import annotations

import secrets

from zmqengine_http.apis.anthropic.conversation import plain_messages, plain_tools
from zmqengine_http.apis.anthropic.errors import anthropic_error, overloaded_as_529
from zmqengine_http.apis.anthropic.request import COUNT_BODY, MESSAGES_BODY, CountRequest, MessagesRequest
from zmqengine_http.apis.anthropic.wishes import effort, generation_options, response_format, tool_choice
from zmqengine_http.apis.anthropic.writer import MessagesWriter
from zmqengine_http.endpoint import post
from zmqengine_http.generating.chat import Chat, answer_chat, render
from zmqengine_http.generating.generation import Generation
from zmqengine_http.service import Service
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange


async def messages(service: Service, exchange: Exchange, request: MessagesRequest) -> None:
    """POST /v1/messages."""
    if request.messages[-1].role == "assistant":
        raise ApiError(
            400,
            "messages: this server cannot continue an assistant's message (prefill): the last one is the user's",
            param="messages",
            code="unsupported_value",
        )

    def writer(generation: Generation) -> MessagesWriter:
        return MessagesWriter(generation.id, request.model, len(generation.prompts[0].tokens))

    with overloaded_as_529():
        chat = _chat(service, request)
        await answer_chat(service, exchange, chat, writer, stream=request.stream)


async def count_tokens(service: Service, exchange: Exchange, request: CountRequest) -> None:
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same messages would make."""
    with overloaded_as_529():
        prompt = await render(service, exchange, _chat(service, request))
    await exchange.send_json({"input_tokens": len(prompt.tokens)})


def _chat(service: Service, request: CountRequest) -> Chat:
    model = service.pool.model(request.model)
    choice = request.tool_choice
    return Chat(
        id=f"msg_{secrets.token_hex(16)}",
        model=model,
        messages=plain_messages(request),
        tools=plain_tools(request.tools),
        tool_choice=tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=response_format(request),
        effort=effort(model, request),
        options=generation_options(request),
        # Claude Code reads the refusal, and asks for less from then on.
        cut_max_tokens=False,
    )


ENDPOINTS = (
    post(
        "/v1/messages", MESSAGES_BODY, messages, "Answer a chat, in Anthropic's words",
        streams=True, error_shape=anthropic_error,
    ),
    post(
        "/v1/messages/count_tokens", COUNT_BODY, count_tokens, "How many tokens such a chat has",
        error_shape=anthropic_error,
    ),
)  # fmt: skip
