"""Ollama's API, as thin forms over chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zmqengine_http.apis import chat_completions, completions
from zmqengine_http.apis.chat_completions.request import CHAT_BODY as OPENAI_CHAT_BODY
from zmqengine_http.apis.completions.request import COMPLETION_BODY
from zmqengine_http.apis.ollama import models
from zmqengine_http.apis.ollama.embed import EMBED_BODY, OLD_EMBED_BODY, embed, old_embed
from zmqengine_http.apis.ollama.request import (
    CHAT_BODY,
    GENERATE_BODY,
    MODEL_BODY,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
    chat_fields,
    completion_fields,
    prompt_as_chat,
)
from zmqengine_http.apis.ollama.writer import LINES, OllamaWriter, as_message, as_response, now, ollama_error
from zmqengine_http.endpoint import Service, get, post
from zmqengine_http.generating.chat import answer_chat
from zmqengine_http.generating.generation import Generation, answer_generation
from zmqengine_http.serving.exchange import Exchange

_Fields = Callable[[str, str, Sequence[object]], Mapping[str, object]]


async def chat(service: Service, exchange: Exchange, request: OllamaChatRequest) -> None:
    """POST /api/chat."""
    if request.only_loads:
        await _loaded(service, exchange, request, as_message)
    else:
        await _answer_chat(service, exchange, request, as_message)


async def generate(service: Service, exchange: Exchange, request: OllamaGenerateRequest) -> None:
    """POST /api/generate: through the chat template, or with `raw` or a `suffix` as it is."""
    if request.only_loads:
        await _loaded(service, exchange, request, as_response)
        return
    model = service.pool.model(request.model)
    if not (request.raw or request.suffix) and model.tokenizer.template_for(tools=False):
        await _answer_chat(service, exchange, prompt_as_chat(request), as_response)
        return
    read = COMPLETION_BODY.read_document(completion_fields(request), ignore_unknown=True)
    exchange.note_ignored(read.ignored, 0)
    exchange.stream_headers = LINES
    generation = await completions.make_generation(service, exchange, read.request)
    writer = OllamaWriter(generation, request.model, as_response)
    await answer_generation(service, exchange, generation, writer, stream=request.stream)


async def _answer_chat(
    service: Service, exchange: Exchange, request: OllamaChatRequest, fields: _Fields
) -> None:
    read = OPENAI_CHAT_BODY.read_document(chat_fields(request), ignore_unknown=True)
    exchange.note_ignored(read.ignored, 0)
    exchange.stream_headers = LINES

    def writer(generation: Generation) -> OllamaWriter:
        return OllamaWriter(generation, request.model, fields)

    chat = await chat_completions.make_chat(service, exchange, read.request)
    await answer_chat(service, exchange, chat, writer, stream=request.stream)


async def _loaded(service: Service, exchange: Exchange, request: OllamaRequest, fields: _Fields) -> None:
    """Respond once the model is loaded, or with `keep_alive: 0` unloaded; an unknown one is a 404."""
    name, reason = request.model, "load"
    if service.launched is None:
        service.pool.model(name)
    elif exchange.keep_alive_s == 0:
        reason = "unload"
        exchange.check_operates()
        await service.launched.unload(service.launched.entry(name).name, pinned=exchange.unloads_pinned)
    else:
        exchange.check_operates()
        await service.launched.load(name, exchange.keep_alive_s)
    document = {**fields("", "", ()), "done": True, "done_reason": reason}
    await exchange.send_json({"model": request.model, "created_at": now(), **document})


async def pull(service: Service, exchange: Exchange, request: OllamaModelRequest) -> None:
    """POST /api/pull: nothing is downloaded here; a model that is served is there already."""
    name = request.wanted
    if service.launched is None:
        service.pool.model(name)
    else:
        service.launched.entry(name)
    await exchange.send_json({"status": "success"})


ENDPOINTS = (
    post("/api/chat", CHAT_BODY, chat, "Answer a chat, in Ollama's words", error_shape=ollama_error),
    post("/api/generate", GENERATE_BODY, generate, "Answer a prompt, in Ollama's words", error_shape=ollama_error),
    get("/api/tags", models.tags, "The models there are, as Ollama lists them", error_shape=ollama_error),
    get("/api/ps", models.ps, "The models that are loaded, as Ollama lists them", error_shape=ollama_error),
    post("/api/embed", EMBED_BODY, embed, "Turn texts into vectors, in Ollama's words", error_shape=ollama_error),
    post("/api/embeddings", OLD_EMBED_BODY, old_embed, "Turn a text into a vector, in Ollama's words",
         error_shape=ollama_error),
    post("/api/show", MODEL_BODY, models.show, "The facts of one model, for Ollama's clients",
         error_shape=ollama_error, needs_model=False),
    post("/api/pull", MODEL_BODY, pull, "Whether a model is served, for Ollama's clients",
         error_shape=ollama_error, needs_model=False),
    get("/api/version", models.version, "The version of Ollama's API", error_shape=ollama_error),
)  # fmt: skip
