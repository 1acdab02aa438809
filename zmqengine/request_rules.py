"""Limits of a request beyond the types of its fields, checked by client, worker and engine. The HTTP front-end
reports the same errors in OpenAI's terms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

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


def check_min_tokens(sampling: Sampling, max_tokens: int | None) -> None:
    """Raise `BadRequest` for a `min_tokens` over `max_tokens`."""
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: {sampling.min_tokens} are more than max_tokens {max_tokens}")


def check_prediction(prediction: Sequence[int], tokens_max: int) -> None:
    """Raise `BadRequest` for a prediction over the worker's limit."""
    if len(prediction) > tokens_max:
        raise BadRequest(f"prediction: {len(prediction)} tokens, the worker takes {tokens_max}")


def check_forced(forced: Sequence[int], max_tokens: int | None, *, constrained: bool) -> None:
    """Raise `BadRequest` for forced output that does not fit `max_tokens` or has a constraint beside it."""
    if forced and constrained:
        raise BadRequest("forced: output that is given cannot have a constraint")
    if max_tokens is not None and len(forced) > max_tokens:
        raise BadRequest(f"forced: {len(forced)} tokens are more than max_tokens {max_tokens}")


def check_keep(keep: float | None, *, allowed: bool, images: bool, pin: bool) -> None:
    """Raise `BadRequest` for a share of the prompt to read that the worker cannot choose."""
    if keep is None:
        return
    if not allowed:
        raise BadRequest("prefill_keep: this worker has no draft model to choose tokens with (--draft)")
    if images or pin:
        beside = "images" if images else "pin"
        raise BadRequest(f"prefill_keep: a prompt with {beside} is read whole; leave one of them out")


class MarkerTokens(Protocol):
    """Tokens of a bound on reasoning."""

    @property
    def opener(self) -> Sequence[int]: ...
    @property
    def closer(self) -> Sequence[int]: ...
    @property
    def then(self) -> Sequence[int]: ...


def marker_ids(thinking_max: MarkerTokens) -> list[int]:
    """All token ids of a bound on reasoning."""
    return [*thinking_max.opener, *thinking_max.closer, *thinking_max.then]


def length_of(prompt: Sequence[int], max_tokens: int | None) -> str:
    """The length of a request, in words."""
    asked = "" if max_tokens is None else f" + max_tokens {max_tokens}"
    return f"prompt of {len(prompt)} tokens{asked}"


class Vectors(NamedTuple):
    """Contents of an embed, in the words of SPEC.md."""

    texts: Sequence[Sequence[int]]
    second: Sequence[int] = ()
    output: str = "embedding"
    dimensions: int | None = None


class VectorFacts(Protocol):
    """Facts of the model that an embed is checked against."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dimensions(self) -> int: ...
    @property
    def labels(self) -> int: ...


class VectorLimits(Protocol):
    """Limits of the worker that an embed is checked against."""

    @property
    def context_tokens_max(self) -> int: ...
    @property
    def texts_max(self) -> int: ...


def no_generation(name: str) -> str:
    """The error text for a request to generate with a model that only makes vectors."""
    return f"the model {name} generates no text: it makes embeddings or scores"


def no_vision(name: str) -> str:
    """The error text for images and a model without a vision card."""
    return f"the model {name} sees no images"


def vector_width(output: str, dimensions: int | None, model: VectorFacts) -> int:
    """Floats of each vector of an embed. Raises `BadRequest` if the model makes no such vectors."""
    whole = model.labels if output == "score" else model.dimensions
    if not whole:
        other = "embeddings" if model.dimensions else "scores" if model.labels else "text"
        wanted = "scores, which need a reranker" if output == "score" else "embeddings"
        raise BadRequest(f"the model {model.name} makes no {wanted}: it makes {other}")
    if dimensions is None:
        return whole
    if output == "score" or dimensions > whole:
        raise BadRequest(f"dimensions: {dimensions} are more than the {whole} of the model {model.name}")
    return dimensions


def check_vectors(vectors: Vectors, model: VectorFacts, limits: VectorLimits) -> None:
    """Raise `BadRequest` or `ContextExceeded` for an embed that this worker cannot carry out, naming the text."""
    vector_width(vectors.output, vectors.dimensions, model)
    texts, second = vectors.texts, vectors.second
    if len(texts) > limits.texts_max:
        raise BadRequest(f"texts: {len(texts)}, the worker takes {limits.texts_max} at once")
    lengths = list(map(len, texts))
    # The usual texts in few calls: a message may have thousands. By their type no id is negative.
    is_usual = min(lengths) > 0 and max(lengths) <= limits.context_tokens_max
    if not is_usual or max(map(max, texts)) >= model.vocab_size:
        for index, text in enumerate(texts):
            check_text(text, index, limits.context_tokens_max)
            fault = outside_vocabulary(text, model.vocab_size)
            if fault is not None:
                raise BadRequest(f"texts: text {index}: {fault}")
    if second and (
        len(second) != len(texts)
        or any(start >= len(text) for start, text in zip(second, texts, strict=True))
    ):
        raise BadRequest("second: one index within its text for each of the texts")


def check_text(text: Sequence[int], index: int, context_tokens: int, *, is_whole: bool = True) -> None:
    """Raise for a text that is empty or longer than the model reads; one that is not whole has more tokens."""
    if not text:
        raise BadRequest(f"texts: text {index} is empty")
    if len(text) > context_tokens:
        count = f"{'' if is_whole else 'over '}{len(text)}"
        raise ContextExceeded(
            f"text {index} has {count} tokens, over the {context_tokens} that the model reads: "
            "shorten it, or ask for it to be truncated",
            text=index,
        )
