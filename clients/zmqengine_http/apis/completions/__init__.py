"""POST /v1/completions: OpenAI's text completion API."""

from __future__ import annotations

import functools
import secrets

import msgspec

from zmqengine_http.apis.completions.fill_in_middle import middle_ends, middle_prompt
from zmqengine_http.apis.completions.request import COMPLETION_BODY, CompletionRequest
from zmqengine_http.apis.completions.writer import TextWriter
from zmqengine_http.apis.openai_api.generation_request import check_context
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.generation import Generation, answer_generation, check_ids
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model


async def answer_completion(service: Service, exchange: Exchange, request: CompletionRequest) -> None:
    """Generate, and respond in OpenAI's format."""
    generation = await make_generation(service, exchange, request)
    name = request.model or generation.model.card.name
    echo = _texts(generation.model, request) if request.echo else ()
    if request.max_tokens == 0 and any(len(prompt.tokens) < 2 for prompt in generation.prompts):
        raise bad_field(
            "prompt", "the first token of a prompt has no logprob: give two or more, or max_tokens"
        )
    writer = TextWriter(
        generation, name, include_usage=request.include_usage, timings=request.timings_per_token, echo=echo
    )
    await answer_generation(service, exchange, generation, writer, stream=request.stream)


async def make_generation(service: Service, exchange: Exchange, request: CompletionRequest) -> Generation:
    model = service.pool.model(request.model)
    check_context(request.num_ctx, model)
    options = request.options(max_tokens=request.tokens_max, logprobs=request.logprobs)
    if request.suffix:
        ends = [*options.stop_token_ids, *middle_ends(model)]
        options = msgspec.structs.replace(options, stop_token_ids=list(dict.fromkeys(ends)))
    return Generation(
        id=f"cmpl-{secrets.token_hex(16)}",
        model=model,
        prompts=await _prompts(service, exchange, request, model),
        prompt_param="prompt",
        options=options,
        scores_prompts=request.scores_prompts,
    )


def _texts(model: Model, request: CompletionRequest) -> list[str]:
    decode = model.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in request.prompts]


async def _prompts(
    service: Service, exchange: Exchange, request: CompletionRequest, model: Model
) -> list[Prompt]:
    prompts = request.prompts
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_ids("prompt", prompt, model)
    tokenizing, suffix = service.tokenizing, request.suffix
    if suffix:
        works = [functools.partial(middle_prompt, model, prompt, suffix) for prompt in prompts]
        return [Prompt(await tokenizing.run(exchange.id, exchange.body_bytes, work, len)) for work in works]
    # `CompletionRequest.prompts` refuses mixtures, so either all are texts or none is.
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = await tokenizing.texts(exchange.id, exchange.body_bytes, model, texts) if texts else prompts
    return [Prompt(tokens) for tokens in encoded if not isinstance(tokens, str)]


ENDPOINTS = (post("/v1/completions", COMPLETION_BODY, answer_completion, "Continue a text", streams=True),)
