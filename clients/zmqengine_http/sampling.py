"""From the fields of a request to the options of the client library."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_client.options import Options
from zmqengine_http.errors import ApiError, bad_field
from zmqengine_http.requests import CommonRequest
from zmqengine_http.worker import Model

TOP_P_MIN = 1e-6
"""OpenAI takes a top_p of 0, which keeps the one most probable token; so does this."""
SEED_MASK = 2**63 - 1


def make_options(
    request: CommonRequest, model: Model, *, max_tokens: int | None, logprobs: int | None, temperature: float
) -> Options:
    """The options of every choice but for seed and id. Raises a 400 for token ids outside the vocabulary.

    `max_tokens` None stands for all that the context leaves.
    """
    bias = {int(key): value for key, value in request.logit_bias.items()}
    check_ids("logit_bias", list(bias), model)
    check_ids("stop_token_ids", request.stop_token_ids, model)
    return Options(
        max_tokens=max_tokens,
        temperature=temperature if request.temperature is None else request.temperature,
        top_p=max(request.top_p, TOP_P_MIN),
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=bias,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        priority=request.priority,
        deadline_ms=request.deadline_ms,
    )


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: another for each, the same in every run. None stays None."""
    return None if seed is None else (seed + index) & SEED_MASK


def check_ids(param: str, ids: Sequence[int], model: Model) -> None:
    """Raise a 400 if a token id is outside the model's vocabulary."""
    highest = max(ids, default=0)
    if highest >= model.card.vocab_size:
        raise bad_field(param, f"token id {highest} is outside the vocabulary of {model.card.vocab_size}")


def check_length(param: str, prompt: Sequence[int], max_tokens: int | None, model: Model) -> None:
    """Raise a 400 if the prompt is empty, or it and `max_tokens` do not fit the context."""
    if not prompt:
        raise bad_field(param, "the prompt has no tokens")
    context, wanted = model.card.context_tokens, max_tokens or 1
    if len(prompt) + wanted > context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested {len(prompt) + wanted} "
            f"tokens ({len(prompt)} in the {param}, {wanted} in the completion). Please reduce the length of the "
            f"{param} or of the completion.",
            param=param,
            code="context_length_exceeded",
        )
