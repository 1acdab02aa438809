"""One API-neutral generation: its options, its way to the workers, and the choices that come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from msgspec import Struct

from zmqengine.protocol.messages import CacheScope, Constraint, ThinkingMax
from zmqengine.request_rules import outside_vocabulary
from zmqengine.sampling_params import SamplingOptions
from zmqengine_client.aio.streams import AsyncTokenStream
from zmqengine_client.core.options import Options
from zmqengine_client.text.answer_text import AnswerText
from zmqengine_client.text.stop_strings import StopAutomaton
from zmqengine_client.text.tool_calls import TextSplitter
from zmqengine_http.answers.answer_events import AnswerWriter
from zmqengine_http.answers.choice import ChoiceStream
from zmqengine_http.answers.respond import respond_events, respond_whole
from zmqengine_http.endpoint import Service
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.serving.errors import ContextTooLong, bad_field
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import Model, PooledWorker

TOP_P_MIN = 1e-6
"""Stands in for OpenAI's top_p of 0, which keeps only the most probable token; the worker's top_p must be
positive."""
WRITTEN_TOKENS = 65_536
"""Tokens of prompts written to workers without a yield to the event loop: some 10 ms."""
SEED_MASK = 2**63 - 1


class GenerationOptions(Struct, frozen=True, kw_only=True):
    """Sampling and stop options of a request, checked for range.

    `max_tokens`: None for all that the context leaves. `sampling`: the parameters that were given; a missing
    temperature, top_p or top_k is the model's default. `logprobs`: None for none, else the number of
    alternatives per token. `n`: choices per prompt. `prediction`: token ids that the output may resemble
    (draft tokens). `cache_key`: requests with one key go to one worker. `cache_scope`: who may reuse the
    prompt's KV blocks there; `pin` exempts them from eviction. `constraint`: the grammar that the output must
    follow. `thinking_max`: the bound on its reasoning. `prefill_keep`: the share of the prompt that is read.
    """

    sampling: SamplingOptions = {}
    max_tokens: int | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1
    priority: int = 0
    deadline_ms: int | None = None
    cache_key: str | None = None
    cache_scope: CacheScope | None = None
    pin: bool = False
    constraint: Constraint | None = None
    thinking_max: ThinkingMax | None = None
    prediction: list[int] = []
    prefill_keep: float | None = None


def no_splitter(prompt: Prompt) -> TextSplitter | None:
    """The `splitter` of a generation whose text is all content."""
    return None


class Generation(Struct, frozen=True, kw_only=True):
    """An API-neutral request with tokenized prompts.

    `id` names the response. Each of the `prompts` gets `options.n` choices; `prompt_param` is the API's field
    name for the prompt in a refusal. `splitter` makes the parser that finds reasoning and tool calls in the
    text of a choice. `first_call_only` ends a choice after its first tool call. Without `cut_max_tokens` a
    max_tokens beyond the context is always a 400, for clients that react to it by asking for less. `scores_prompts`:
    the logprobs of a choice begin with those of its prompt, all tokens but the first.
    """

    id: str
    model: Model
    prompts: Sequence[Prompt]
    prompt_param: str
    options: GenerationOptions
    splitter: Callable[[Prompt], TextSplitter | None] = no_splitter
    first_call_only: bool = False
    cut_max_tokens: bool = True
    scores_prompts: bool = False


async def answer_generation(
    service: Service, exchange: Exchange, generation: Generation, writer: AnswerWriter, *, stream: bool
) -> None:
    """Generate and respond through `writer`, as events or as one body. Raises errors that become refusals."""
    exchange.facts |= {"completion": generation.id, "model": generation.model.card.name}
    if service.config.log_prompts:
        decode = generation.model.tokenizer.decode
        exchange.facts["prompts"] = [decode(prompt.tokens) for prompt in generation.prompts]
    started = await _start(service, generation, exchange.caller)
    choices, per_prompt = [choice for choice, _ in started], generation.options.n
    try:
        if stream:
            keepalive_ms = service.config.keepalive_ms
            await respond_events(exchange, choices, per_prompt, writer, keepalive_ms=keepalive_ms)
        else:
            await respond_whole(exchange, choices, per_prompt, writer)
    finally:
        _release(started)


async def _start(
    service: Service, generation: Generation, caller: str
) -> list[tuple[ChoiceStream, PooledWorker]]:
    """Start every choice on the worker chosen for its prompt; the caller must `_release` them.

    Starts all or none: an error of one releases the others and is raised. Yields to the event loop between long
    prompts, each of which is written once for each choice.
    """
    model, asked = generation.model, generation.options
    count = len(generation.prompts) * asked.n
    if count > service.config.choices_max:
        raise bad_field("n", f"{count} choices are more than the {service.config.choices_max} allowed")
    cut = generation.cut_max_tokens and service.config.max_tokens_overflow == "cut"
    limits = [
        fitting_max_tokens(generation.prompt_param, prompt.tokens, asked.max_tokens, model, cut=cut)
        for prompt in generation.prompts
    ]
    options = make_options(asked, model, default_temperature=service.config.default_temperature)
    options["cache_salt"] = caller_salt(caller, asked.cache_scope, model)
    ends = frozenset(asked.stop_token_ids) | frozenset(
        () if asked.ignore_eos else model.tokenizer.eos_token_ids
    )
    min_tokens = asked.sampling.get("min_tokens", 0)
    stops, written = StopAutomaton(asked.stop), 0
    started: list[tuple[ChoiceStream, PooledWorker]] = []
    try:
        for prompt, max_tokens in zip(generation.prompts, limits, strict=True):
            output = 1 if max_tokens is None else max_tokens
            worker = service.pool.choose(model, prompt.tokens, asked.cache_key, output)
            options["max_tokens"] = max_tokens
            for number in range(asked.n):
                index = len(started)
                options["seed"] = choice_seed(asked.seed, number)
                options["request_id"] = f"{generation.id}-{index}"
                prompt_scores = None
                if generation.scores_prompts and len(prompt.tokens) > 1:
                    prompt_scores = _score(worker, prompt, options)
                    written += len(prompt.tokens)
                if max_tokens == 0 and prompt_scores is not None:
                    stream = prompt_scores
                else:
                    stream = worker.client.generate_tokens(prompt.tokens, images=prompt.images, **options)
                splitter = generation.splitter(prompt)
                text = AnswerText(
                    model.tokenizer, stops, ends, splitter=splitter, unsearched_tokens=min_tokens
                )
                choice = ChoiceStream(
                    index, stream, text, prompt_scores=prompt_scores,
                    prompt_tokens=len(prompt.tokens), with_logprobs=asked.logprobs is not None,
                    first_call_only=generation.first_call_only,
                    constrained=asked.constraint is not None,
                )  # fmt: skip
                started.append((choice, worker))
                worker.running += 1
                written += len(prompt.tokens)
                if written > WRITTEN_TOKENS:
                    written = 0
                    await asyncio.sleep(0)
    except BaseException:
        _release(started)
        raise
    return started


def caller_salt(caller: str, scope: CacheScope | None, model: Model) -> str:
    """The part of a scope that is this caller's: to the worker all callers are one session with one key.

    Raises a 400 for a scope that the worker would not keep apart.
    """
    if not caller or model.limits.cache_salt:
        return caller
    if scope in ("key", "session"):
        raise bad_field("cache_scope", "the worker is too old to keep the callers of this server apart")
    return ""


def _score(worker: PooledWorker, prompt: Prompt, options: Options) -> AsyncTokenStream:
    """The prompt's tokens with their logprobs, all but the first, which has nothing before it to be predicted from.

    A request of its own, so that seed and penalties of the choice see the prompt as one.
    """
    forced = prompt.tokens[1:]
    own = Options(
        forced=forced,
        max_tokens=len(forced),
        seed=options["seed"],
        logprobs=options["logprobs"],
        priority=options["priority"],
        deadline_ms=options["deadline_ms"],
        cache_scope=options["cache_scope"],
        cache_salt=options["cache_salt"],
        adapter=options["adapter"],
        request_id=f"{options['request_id']}-prompt",
    )
    return worker.client.generate_tokens(prompt.tokens[:1], **own)


def _release(started: Sequence[tuple[ChoiceStream, PooledWorker]]) -> None:
    """Abort what still runs, and take the choices off their workers' counts."""
    for choice, worker in started:
        choice.close()
        worker.running -= 1


def make_options(asked: GenerationOptions, model: Model, *, default_temperature: float | None) -> Options:
    """The client library's options of every choice, without seed, request id and max_tokens.

    `default_temperature` overrides the model's own. Raises a 400 for token ids outside the vocabulary.
    """
    check_ids("logit_bias", list(asked.sampling.get("logit_bias", ())), model)
    check_ids("stop_token_ids", asked.stop_token_ids, model)
    defaults = model.sampling_defaults
    if default_temperature is not None:
        defaults = defaults._replace(temperature=default_temperature)
    options = Options(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        logprobs=asked.logprobs,
        priority=asked.priority,
        deadline_ms=asked.deadline_ms,
        cache_scope=asked.cache_scope,
        pin=asked.pin,
        constraint=asked.constraint,
        thinking_max=asked.thinking_max,
        prediction=asked.prediction,
        prefill_keep=asked.prefill_keep,
        adapter=model.adapter,
    )
    options.update(cast(Options, asked.sampling))
    options["top_p"] = max(options["top_p"], TOP_P_MIN)
    options["top_k"] = max(options["top_k"], 0)
    return options


def choice_seed(seed: int | None, number: int) -> int | None:
    """The seed of choice `number` of a prompt, distinct per choice; None stays None.

    As in vLLM, a prompt has the same seeds in a list as alone.
    """
    return None if seed is None else (seed + number) & SEED_MASK


def check_ids(param: str, ids: Sequence[int], model: Model) -> None:
    """Raise a 400 if a token id is outside the model's vocabulary."""
    fault = outside_vocabulary(ids, model.card.vocab_size)
    if fault is not None:
        raise bad_field(param, fault)


def fitting_max_tokens(
    param: str, prompt: Sequence[int], max_tokens: int | None, model: Model, *, cut: bool
) -> int | None:
    """`max_tokens`, with `cut` limited to the context left by the prompt; None, for all of it, stays None.

    Raises a 400 if the prompt is empty or leaves too little.
    """
    if not prompt:
        raise bad_field(param, "the prompt has no tokens")
    context, wanted = model.context_tokens, 1 if max_tokens is None else max_tokens
    room = context - len(prompt)
    if room < min(wanted, 1) or (wanted > room and not cut):
        raise ContextTooLong(param, prompt=len(prompt), wanted=wanted, context=context)
    return None if max_tokens is None else min(max_tokens, room)
