"""How tokens are drawn and when they end: the part of the inner request that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msgspec import Struct

from zmqengine.protocol.messages import CacheScope, Constraint
from zmqengine.request_rules import outside_vocabulary
from zmqengine.sampling_params import SamplingOptions
from zmqengine_client.core.options import Options
from zmqengine_http.serving.errors import ContextTooLong, bad_field
from zmqengine_http.workers.worker import Model

TOP_P_MIN = 1e-6
"""OpenAI takes a top_p of 0, which keeps the one most probable token; so does this."""
SEED_MASK = 2**63 - 1


class GenerationOptions(Struct, frozen=True, kw_only=True):
    """The options of a request, checked for range. `max_tokens` None is all that the context leaves.

    `sampling` has what was given: a temperature, top_p or top_k that is left out is the model's own default.
    `logprobs`: None for none, else how many alternatives each token has. `n` choices are made of each prompt.
    `prediction` is token ids that the output may be like.
    Requests of one `cache_key` go to one worker; `cache_scope` says who may go on there from what was read of the
    prompt, and `pin` keeps it. `constraint` is what the output must be.
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
    prediction: list[int] = []


def make_options(asked: GenerationOptions, model: Model, *, default_temperature: float | None) -> Options:
    """The client library's options of every choice but for seed, id and max_tokens.

    `default_temperature` wins over the model's own. Raises a 400 for token ids outside the vocabulary.
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
        prediction=asked.prediction,
    )
    options.update(cast(Options, asked.sampling))
    options["top_p"] = max(options["top_p"], TOP_P_MIN)
    options["top_k"] = max(options["top_k"], 0)
    return options


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: another for each, the same in every run. None stays None."""
    return None if seed is None else (seed + index) & SEED_MASK


def check_ids(param: str, ids: Sequence[int], model: Model) -> None:
    """Raise a 400 if a token id is outside the model's vocabulary."""
    fault = outside_vocabulary(ids, model.card.vocab_size)
    if fault is not None:
        raise bad_field(param, fault)


def fitting_max_tokens(
    param: str, prompt: Sequence[int], max_tokens: int | None, model: Model, *, cut: bool
) -> int | None:
    """How many tokens may be generated: `max_tokens`, cut to what the prompt leaves of the context where `cut`.

    None stays None, which is all that is left. Raises a 400 if the prompt is empty or leaves too little.
    """
    if not prompt:
        raise bad_field(param, "the prompt has no tokens")
    context, wanted = model.card.context_tokens, max_tokens or 1
    room = context - len(prompt)
    if room < 1 or (wanted > room and not cut):
        raise ContextTooLong(param, prompt=len(prompt), wanted=wanted, context=context)
    return None if max_tokens is None else min(max_tokens, room)
