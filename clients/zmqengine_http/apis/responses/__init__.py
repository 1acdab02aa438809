"""OpenAI's Responses API. The conversation is in the request, or in the memory of recent responses."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

from zmqengine.sampling_params import SamplingOptions
from zmqengine_client.errors import ZmqEngineError
from zmqengine_http.apis.responses.conversation import InputItems, known_items, skipped_facts
from zmqengine_http.apis.responses.input_list import listed_items
from zmqengine_http.apis.responses.request import RESPONSES_BODY, Item, ResponsesRequest
from zmqengine_http.apis.responses.response_memory import ItemMemory, ResponseMemory, StoredResponse
from zmqengine_http.apis.responses.tools import ToolBook, tool_choice
from zmqengine_http.apis.responses.writer import ReasoningShape, ResponsesWriter, tells_by_event
from zmqengine_http.endpoint import Service, delete, get, post
from zmqengine_http.generating.chat import Chat, ThinkingTokens, answer_chat, render
from zmqengine_http.generating.generation import Generation, GenerationOptions
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.errors import ApiError, from_engine
from zmqengine_http.serving.exchange import JSON, Exchange

PACKED = "reasoning.encrypted_content"
_ITEMS = ItemMemory()
"""Items of this process's responses."""
_RESPONSES = ResponseMemory()


class _Asked(NamedTuple):
    """A request as a `Chat`, and the names of its tools."""

    chat: Chat
    book: ToolBook


async def responses(service: Service, exchange: Exchange, request: ResponsesRequest) -> None:
    """POST /v1/responses."""
    chat, book = _asked(service, exchange, request)
    reasoning = request.reasoning
    summary = bool(reasoning and (reasoning.summary or reasoning.generate_summary))
    shape = ReasoningShape(summary=summary, packed=PACKED in request.include)
    head = _head(request, request.model or chat.model.card.name)
    owner = exchange.caller

    def remember(item: Mapping[str, object]) -> None:
        _ITEMS.remember(owner, item)

    def store(document: dict[str, object]) -> None:
        _RESPONSES.remember(owner, request.previous_response_id, known_items(request), document)

    def writer(generation: Generation | Chat) -> ResponsesWriter:
        if request.store is False:
            return ResponsesWriter(generation.id, head, book, shape)
        return ResponsesWriter(generation.id, head, book, shape, remember, store)

    try:
        await answer_chat(service, exchange, chat, writer, stream=request.stream)
    except (ZmqEngineError, ApiError) as error:
        refusal = error if isinstance(error, ApiError) else from_engine(error)
        if exchange.started or not (request.stream and tells_by_event(exchange, refusal)):
            raise
        exchange.facts["error"] = refusal.code
        await exchange.start(200, exchange.stream_headers)
        await exchange.write(writer(chat).error(refusal), last=True)


async def input_tokens(service: Service, exchange: Exchange, request: ResponsesRequest) -> None:
    """POST /v1/responses/input_tokens: the number of tokens in the prompt of such a request."""
    prompt = await render(service, exchange, _asked(service, exchange, request).chat)
    await exchange.send_json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


async def get_response(service: Service, exchange: Exchange) -> None:
    """GET /v1/responses/{id}: a recent response, while this process remembers it."""
    await exchange.send(200, [JSON], _stored(exchange).document)


async def delete_response(service: Service, exchange: Exchange) -> None:
    """DELETE /v1/responses/{id}: forget a response, its request and its items."""
    id_ = exchange.scope["path_params"]["id"]
    _stored(exchange)
    for item in _RESPONSES.forget(exchange.caller, id_) or ():
        _ITEMS.forget(exchange.caller, item)
    await exchange.send_json({"id": id_, "object": "response", "deleted": True})


async def input_items(service: Service, exchange: Exchange) -> None:
    """GET /v1/responses/{id}/input_items: what the request of a response brought itself."""
    query = dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
    await exchange.send_json(
        listed_items(msgspec.json.decode(_stored(exchange).items, type=list[Item]), query)
    )


def _stored(exchange: Exchange) -> StoredResponse:
    """The caller's response that the path names. Raises a 404."""
    id_ = exchange.scope["path_params"]["id"]
    stored = _RESPONSES.find(exchange.caller, id_)
    if stored is None:
        raise ApiError(404, f"Response with id {id_[:100]!r} not found.", param="id", code="not_found")
    return stored


def _asked(service: Service, exchange: Exchange, request: ResponsesRequest) -> _Asked:
    model = service.pool.model(request.model)
    pictures = Pictures(model)
    items = InputItems(
        request,
        functools.partial(_ITEMS.find, exchange.caller),
        _earlier(exchange, request.previous_response_id),
        pictures,
    )
    book = ToolBook(request.tools)
    exchange.facts |= skipped_facts(items.skipped, book.skipped)
    choice = tool_choice(request.tool_choice, book)
    chat = Chat(
        id=f"resp_{secrets.token_hex(16)}",
        model=model,
        messages=items.messages,
        pictures=pictures.all,
        tools=book.plain,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        effort=_effort(request),
        thinking=_thinking(request),
        options=GenerationOptions(
            sampling=_sampling(request),
            max_tokens=request.max_output_tokens,
            cache_key=request.prompt_cache_key,
            cache_scope=request.cache_scope,
            pin=request.pin,
            prefill_keep=request.prefill_keep,
        ),
        prompt_param="input",
    )
    return _Asked(chat, book)


def _earlier(exchange: Exchange, previous: str | None) -> list[Item]:
    """The conversation up to a response. Raises a 400 for one that is not remembered."""
    if previous is None:
        return []
    earlier = _RESPONSES.conversation(exchange.caller, previous)
    if earlier is None:
        raise ApiError(
            400,
            f"Previous response with id {previous[:100]!r} not found: only the latest are kept, in memory, each for "
            "the key that asked for it, and none that said store false; send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return earlier


def _effort(request: ResponsesRequest) -> str | None:
    reasoning = request.reasoning
    if reasoning is None or reasoning.effort or not reasoning.max_tokens:
        return reasoning.effort if reasoning else None
    # A bound alone asks for reasoning, as in chats.
    return "medium"


def _thinking(request: ResponsesRequest) -> ThinkingTokens | None:
    if request.reasoning is None or request.reasoning.max_tokens is None:
        return None
    return ThinkingTokens(request.reasoning.max_tokens, "reasoning.max_tokens")


def _sampling(request: ResponsesRequest) -> SamplingOptions:
    sampling = SamplingOptions()
    if request.top_p is not None:
        sampling["top_p"] = request.top_p
    if request.temperature is not None:
        sampling["temperature"] = request.temperature
    return sampling


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
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
    }


def _response_format(request: ResponsesRequest) -> dict[str, object]:
    """The format in the form of chat completions, which nests the schema in a `json_schema` field."""
    text_format = request.text.format if request.text else None
    if not text_format or text_format.get("type") != "json_schema":
        return dict(text_format or {})
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in text_format.items() if name != "type"},
    }


ENDPOINTS = (
    post("/v1/responses", RESPONSES_BODY, responses, "Answer a conversation of items", streams=True),
    post(
        "/v1/responses/input_tokens", RESPONSES_BODY, input_tokens, "How many tokens such a conversation has"
    ),
    get("/v1/responses/{id}", get_response, "A recent response"),
    delete("/v1/responses/{id}", delete_response, "Forget a recent response"),
    get("/v1/responses/{id}/input_items", input_items, "The items of the request of a recent response"),
)
