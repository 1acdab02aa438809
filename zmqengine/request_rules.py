"""Limits of a request beyond the types of its fields, checked by client, worker and engine. The HTTP front-end
reports the same errors in OpenAI's terms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zmqengine.errors import BadRequest, ContextExceeded
from zmqengine.sampling_params import Sampling

NO_CONSTRAINT = "this worker does not support constraints"


def outside_vocabulary(ids: Collection[int], vocab_size: int) -> str | None:
    """The error text for a token id outside the vocabulary, or None. Such an id in MLX is an unchecked read."""
    if not ids or (max(ids) < vocab_size and min(ids) >= 0):
        return None
    odd = max(ids) if max(ids) >= vocab_size else min(ids)
    return f"token id {odd} is outside the vocabulary of {vocab_size}"


def check_token_ids(vocab_size: int, sampling: Sampling, **ids: Collection[int]) -> None:
    """Raise `BadRequest`, naming the field, for a token id outside the vocabulary."""
    for name, values in (*ids.items(), ("logit_bias", sampling.logit_bias)):
        fault = outside_vocabulary(values, vocab_size)
        if fault is not None:
            raise BadRequest(f"{name}: {fault}")


def check_context(prompt: Sequence[int], max_tokens: int | None, context_tokens: int) -> None:
    """Raise `ContextExceeded` if prompt and output exceed the context. Without `max_tokens` the output is one token."""
    if len(prompt) + (max_tokens or 1) > context_tokens:
        raise ContextExceeded(
            f"{length_of(prompt, max_tokens)} is over the context of {context_tokens} tokens"
        )


def check_prediction(prediction: Sequence[int], tokens_max: int) -> None:
    """Raise `BadRequest` for a prediction over the worker's limit."""
    if len(prediction) > tokens_max:
        raise BadRequest(f"prediction: {len(prediction)} tokens, the worker takes {tokens_max}")


def length_of(prompt: Sequence[int], max_tokens: int | None) -> str:
    """The length of a request, in words."""
    asked = "" if max_tokens is None else f" + max_tokens {max_tokens}"
    return f"prompt of {len(prompt)} tokens{asked}"
