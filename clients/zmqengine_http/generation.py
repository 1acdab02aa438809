"""The one inner request that every API is translated to, and its way to the workers and back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from zmqengine_http.answer import Answer, Choices
from zmqengine_http.answer_events import AnswerWriter
from zmqengine_http.answer_text import AnswerText
from zmqengine_http.errors import bad_field
from zmqengine_http.exchange import Exchange
from zmqengine_http.generation_options import (
    GenerationOptions,
    choice_seed,
    fitting_max_tokens,
    make_options,
)
from zmqengine_http.prompts import Prompt
from zmqengine_http.respond import respond_events, respond_whole
from zmqengine_http.service import Service
from zmqengine_http.tool_calls import TextSplitter
from zmqengine_http.worker import Model


def no_splitter(prompt: Prompt) -> TextSplitter | None:
    """For answers that are all content."""
    return None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is to be generated, in no API's words.

    `id` names the response. Each of the `prompts` gets `options.n` choices; `prompt_param` is what the API calls the
    prompt in a refusal. `splitter` makes what finds reasoning and tool calls in the answer to a prompt.
    `first_call_only` ends a choice after its first tool call. Without `cut_max_tokens` more than the context leaves is
    always a 400: some clients then ask for less.
    """

    id: str
    model: Model
    prompts: Sequence[Prompt]
    prompt_param: str
    options: GenerationOptions
    splitter: Callable[[Prompt], TextSplitter | None] = no_splitter
    first_call_only: bool = False
    cut_max_tokens: bool = True


async def answer_generation(
    service: Service, exchange: Exchange, generation: Generation, writer: AnswerWriter, *, stream: bool
) -> None:
    """Generate, and let `writer` tell it, as events or as one body. Raises what becomes a refusal."""
    exchange.facts |= {"completion": generation.id, "model": generation.model.card.name}
    if service.config.log_prompts:
        decode = generation.model.tokenizer.decode
        exchange.facts["prompts"] = [decode(prompt.tokens) for prompt in generation.prompts]
    async with _choices(service, generation) as choices:
        if stream:
            await respond_events(exchange, choices, writer, keepalive_ms=service.config.keepalive_ms)
        else:
            await respond_whole(exchange, choices, writer)


@contextlib.asynccontextmanager
async def _choices(service: Service, generation: Generation) -> AsyncIterator[Choices]:
    """The choices, being generated on the workers that fit; whatever happens, none runs on after the block."""
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
    ends = frozenset(asked.stop_token_ids) | frozenset(
        () if asked.ignore_eos else model.tokenizer.eos_token_ids
    )
    answers: list[Answer] = []
    with contextlib.ExitStack() as busy:
        try:
            for prompt, max_tokens in zip(generation.prompts, limits, strict=True):
                options["max_tokens"] = max_tokens
                worker = service.pool.choose(model, prompt.tokens, asked.cache_key)
                busy.enter_context(worker.busy(asked.n))
                for _ in range(asked.n):
                    index = len(answers)
                    options["seed"] = choice_seed(asked.seed, index)
                    options["request_id"] = f"{generation.id}-{index}"
                    stream = worker.client.generate_tokens(prompt.tokens, **options)
                    splitter = generation.splitter(prompt)
                    text = AnswerText(model.tokenizer, asked.stop, ends, show_special=splitter is not None)
                    answers.append(
                        Answer(
                            index, stream, text,
                            prompt_tokens=len(prompt.tokens), with_logprobs=asked.logprobs is not None,
                            splitter=splitter, first_call_only=generation.first_call_only,
                        )
                    )  # fmt: skip
            yield Choices(answers, asked.n)
        finally:
            for answer in answers:
                answer.close()
