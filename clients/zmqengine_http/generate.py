"""POST /v1/chat/completions and POST /v1/completions: from a request to the choices being generated."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from zmqengine_http.answer import Answer
from zmqengine_http.bodies import chat_body, text_body
from zmqengine_http.chunks import ChatEvents, EventMaker, TextEvents
from zmqengine_http.config import HttpConfig
from zmqengine_http.errors import bad_field
from zmqengine_http.exchange import Exchange
from zmqengine_http.logprobs import ChatLogprobs, TextLogprobs
from zmqengine_http.pool import Pool
from zmqengine_http.prompts import ChatPrompt, Tokenizing
from zmqengine_http.reading import read_chat, read_completion
from zmqengine_http.requests import ChatRequest, CommonRequest, CompletionRequest
from zmqengine_http.respond import BodyMaker, Choices, Shapes, respond_events, respond_whole
from zmqengine_http.sampling import check_ids, check_length, choice_seed, make_options
from zmqengine_http.text import AnswerText
from zmqengine_http.tool_calls import TextSplitter, make_splitter
from zmqengine_http.worker import Model

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's /v1/completions generates if not told."""


class Service(NamedTuple):
    """What the endpoints share."""

    config: HttpConfig
    pool: Pool
    tokenizing: Tokenizing


class _Job(NamedTuple):
    """A request made ready: what to generate, and how to shape it."""

    id: str
    name: str
    model: Model
    prompts: list[ChatPrompt]
    prompt_param: str
    max_tokens: int | None
    logprobs: int | None
    shapes: Shapes
    splitter: Callable[[ChatPrompt], TextSplitter | None]
    maker: type[ChatEvents] | type[TextEvents]
    body: Callable[..., bytes]
    first_call_only: bool = False


async def chat(service: Service, exchange: Exchange) -> None:
    """Answer POST /v1/chat/completions."""
    request = read_chat(await exchange.read_body(service.config.body_bytes_max))
    await exchange.unless_gone(_chat(service, exchange, request))


async def completions(service: Service, exchange: Exchange) -> None:
    """Answer POST /v1/completions."""
    request = read_completion(await exchange.read_body(service.config.body_bytes_max))
    await exchange.unless_gone(_completions(service, exchange, request))


async def _chat(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    model = service.pool.model(request.model)
    prompt = await service.tokenizing.chat(exchange.id, exchange.body_bytes, model, request)
    top = (request.top_logprobs or 0) if request.logprobs else None
    job = _Job(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        name=request.model or model.card.name,
        model=model,
        prompts=[prompt],
        prompt_param="messages",
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=top,
        shapes=None if top is None else functools.partial(ChatLogprobs, model.token_text, top),
        splitter=functools.partial(_chat_splitter, model, request),
        maker=ChatEvents,
        body=chat_body,
        first_call_only=not request.parallel_tool_calls,
    )
    await _respond(service, exchange, request, job)


async def _completions(service: Service, exchange: Exchange, request: CompletionRequest) -> None:
    model = service.pool.model(request.model)
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            prompts.append(
                ChatPrompt(await service.tokenizing.text(exchange.id, exchange.body_bytes, model, prompt))
            )
        else:
            check_ids("prompt", prompt, model)
            prompts.append(ChatPrompt(prompt))
    top = request.logprobs
    job = _Job(
        id=f"cmpl-{secrets.token_hex(16)}",
        name=request.model or model.card.name,
        model=model,
        prompts=prompts,
        prompt_param="prompt",
        max_tokens=request.max_tokens or COMPLETION_MAX_TOKENS,
        logprobs=top,
        shapes=None if top is None else functools.partial(TextLogprobs, model.token_text, top),
        splitter=lambda prompt: None,
        maker=TextEvents,
        body=text_body,
    )
    await _respond(service, exchange, request, job)


def _chat_splitter(model: Model, request: ChatRequest, prompt: ChatPrompt) -> TextSplitter | None:
    tools = request.tools if request.tool_choice == "auto" else []
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return make_splitter(model.markers, reasoning_open=prompt.reasoning_open, tools=schemas)


async def _respond(service: Service, exchange: Exchange, request: CommonRequest, job: _Job) -> None:
    exchange.facts |= {"completion": job.id, "model": job.name}
    if service.config.log_prompts:
        exchange.facts["prompts"] = [job.model.tokenizer.decode(prompt.tokens) for prompt in job.prompts]
    async with _generating(service, request, job) as choices:
        if request.stream:
            maker: EventMaker = job.maker(job.id, job.name, include_usage=request.include_usage)
            await respond_events(
                exchange, choices, maker,
                include_usage=request.include_usage, keepalive_ms=service.config.keepalive_ms,
            )  # fmt: skip
        else:
            body: BodyMaker = functools.partial(job.body, job.id, job.name)
            await respond_whole(exchange, choices, body)


@contextlib.asynccontextmanager
async def _generating(service: Service, request: CommonRequest, job: _Job) -> AsyncIterator[Choices]:
    """The choices, being generated on the workers that fit; whatever happens, none runs on after the block."""
    count = len(job.prompts) * request.n
    if count > service.config.choices_max:
        raise bad_field("n", f"{count} choices are more than the {service.config.choices_max} allowed")
    for prompt in job.prompts:
        check_length(job.prompt_param, prompt.tokens, job.max_tokens, job.model)
    options = make_options(
        request, job.model,
        max_tokens=job.max_tokens, logprobs=job.logprobs, temperature=service.config.default_temperature,
    )  # fmt: skip
    ends = frozenset(request.stop_token_ids) | frozenset(
        () if request.ignore_eos else job.model.tokenizer.eos_token_ids
    )
    answers: list[Answer] = []
    with contextlib.ExitStack() as busy:
        try:
            for prompt in job.prompts:
                worker = service.pool.choose(job.model, prompt.tokens, request.prompt_cache_key)
                busy.enter_context(worker.busy(request.n))
                for _ in range(request.n):
                    index = len(answers)
                    options["seed"] = choice_seed(request.seed, index)
                    options["request_id"] = f"{job.id}-{index}"
                    stream = worker.client.generate_tokens(prompt.tokens, **options)
                    splitter = job.splitter(prompt)
                    text = AnswerText(
                        job.model.tokenizer, request.stop_strings, ends, show_special=splitter is not None
                    )
                    answers.append(
                        Answer(index, stream, text, splitter=splitter, first_call_only=job.first_call_only)
                    )
            yield Choices(answers, request.n, job.shapes)
        finally:
            for answer in answers:
                answer.close()
