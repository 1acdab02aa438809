"""OpenAI's Responses API without stored conversations: every request carries the whole conversation."""

from __future__ import annotations

import secrets

from zmqengine.sampling_params import SamplingOptions
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.answers.respond import EVENT_STREAM
from zmqengine_http.apis.responses.conversation import InputItems, skipped_facts
from zmqengine_http.apis.responses.items import ItemMemory
from zmqengine_http.apis.responses.request import RESPONSES_BODY, ResponsesRequest
from zmqengine_http.apis.responses.tools import ToolBook, tool_choice
from zmqengine_http.apis.responses.writer import ReasoningShape, ResponsesWriter, tells_by_event
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.chat import Chat, answer_chat
from zmqengine_http.generating.generation import Generation, GenerationOptions
from zmqengine_http.serving.errors import ApiError, from_engine
from zmqengine_http.serving.exchange import Exchange

PACKED = "reasoning.encrypted_content"
_ITEMS = ItemMemory()
"""Items of this process's responses; ids are unguessable, so all clients can share it."""


async def responses(service: Service, exchange: Exchange, request: ResponsesRequest) -> None:
    """POST /v1/responses."""
    model = service.pool.model(request.model)
    items = InputItems(request, _ITEMS)
    book = ToolBook(request.tools)
    exchange.facts |= skipped_facts(items.skipped, book.skipped)
    reasoning = request.reasoning
    choice = tool_choice(request.tool_choice, book)
    chat = Chat(
        id=f"resp_{secrets.token_hex(16)}",
        model=model,
        messages=items.messages,
        tools=book.plain,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        effort=reasoning.effort if reasoning else None,
        options=GenerationOptions(
            sampling=_sampling(request),
            max_tokens=request.max_output_tokens,
            cache_key=request.prompt_cache_key,
            cache_scope=request.cache_scope,
            pin=request.pin,
        ),
        prompt_param="input",
    )
    summary = bool(reasoning and (reasoning.summary or reasoning.generate_summary))
    shape = ReasoningShape(summary=summary, packed=PACKED in request.include)
    head = _head(request, request.model or model.card.name)

    def writer(generation: Generation | Chat) -> ResponsesWriter:
        keep = _ITEMS.remember if request.store is not False else _forget
        return ResponsesWriter(generation.id, head, book, shape, keep)

    try:
        await answer_chat(service, exchange, chat, writer, stream=request.stream)
    except (ZmqEngineError, ApiError) as error:
        refusal = error if isinstance(error, ApiError) else from_engine(error)
        if exchange.started or not (request.stream and tells_by_event(exchange, refusal)):
            raise
        exchange.facts["error"] = refusal.code
        await exchange.start(200, EVENT_STREAM)
        await exchange.write(writer(chat).error(refusal), last=True)


def _sampling(request: ResponsesRequest) -> SamplingOptions:
    sampling = SamplingOptions(top_p=1.0 if request.top_p is None else request.top_p)
    if request.temperature is not None:
        sampling["temperature"] = request.temperature
    return sampling


def _forget(document: dict[str, object]) -> None:
    """Drop an item of a request with `store: false`."""


def _head(request: ResponsesRequest, model: str) -> dict[str, object]:
    """The request's parameters as a response echoes them, without the instructions and tools of the
    client."""
    reasoning = request.reasoning
    return {
        "model": model,
        "background": False,
        "instructions": None,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
    }


def _response_format(request: ResponsesRequest) -> dict[str, object]:
    """The format in the form of chat completions, which nests the schema in a `json_schema` field."""
    given = request.text.format if request.text else None
    if not given or given.get("type") != "json_schema":
        return dict(given or {})
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in given.items() if name != "type"},
    }


ENDPOINTS = (
    post("/v1/responses", RESPONSES_BODY, responses, "Answer a conversation of items", streams=True),
)
