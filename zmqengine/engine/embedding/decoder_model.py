"""A model that mlx-lm has loaded, with a pooling of its last hidden states: texts to vectors, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from zmqengine.checkpoint.recipe import Recipe
from zmqengine.engine.embedding.dense import Dense
from zmqengine.engine.embedding.pooling import unit
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.mlx_lm import make_prompt_cache

TOKENS_MAX_CPU, TOKENS_MAX_GPU = 2048, 8192
"""Tokens of a batch, padding included."""

SHARED_MIN = 8
"""Columns that are the same in all texts, below which a call of their own costs more than it saves: a BOS token."""

_FLOATS = 16
"""Workspace a token, in floats of the hidden width: what prefill of as many tokens takes in the models we know."""


class TextDecoder:
    """A `VectorModel` on the layers of `model`, which may generate too: nothing of it is changed.

    Texts are padded behind, where causal attention and recurrent states do not look.
    """

    def __init__(
        self, model: Any, recipe: Recipe, dense: Sequence[Dense], width: int, *, on_gpu: bool
    ) -> None:
        self._model = model
        self._trunk = trunk_of(model)
        self._recipe = recipe
        self._dense = dense
        self._hidden = width
        self.width = dense[-1].width if dense else width
        self.tokens_max = TOKENS_MAX_GPU if on_gpu else TOKENS_MAX_CPU

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a batch."""
        return self.tokens_max * self._hidden * _FLOATS * 4

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> TextDecoderJob:
        """A job for these texts."""
        return TextDecoderJob(self, texts)

    def caches(self) -> list[Any]:
        """New caches of the model's layers."""
        return list(make_prompt_cache(self._model))

    def hidden(self, ids: mx.array, caches: list[Any] | None) -> mx.array:
        """Last hidden states (texts, tokens, width)."""
        states = self._trunk(ids) if caches is None else self._trunk(ids, cache=caches)
        assert isinstance(states, mx.array)
        return states

    @property
    def pooling(self) -> str:
        """The checkpoint's, or else the mean."""
        return self._recipe.pooling or "mean"

    def vectors(self, pooled: mx.array) -> mx.array:
        """Vectors of length 1."""
        for dense in self._dense:
            pooled = dense(pooled)
        return unit(pooled)


class TextDecoderJob:
    """One batch of texts: a part is a chunk of columns, with the KV caches of those before it.

    Columns in which all texts have the same tokens, such as a prompt's, are computed once for all.
    """

    def __init__(self, model: TextDecoder, texts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._lengths = np.array([len(text) for text in texts])
        self._longest = int(self._lengths.max())
        ids = np.zeros((len(texts), self._longest), np.uint32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        self._ids = ids
        self._shared = shared_columns(ids[:, : int(self._lengths.min()) - 1])
        self._caches: list[Any] | None = None
        self._done = 0
        self._pooled: mx.array | None = None

    def step(self, tokens_max: int) -> int:
        """The next columns; the last ones make the vectors too."""
        start = self._done
        rows, limit = (1, self._shared) if start < self._shared else (len(self._lengths), self._longest)
        stop = min(limit, start + max(1, tokens_max // rows))
        if self._caches is None and stop < self._longest:
            self._caches = self._model.caches()
        hidden = self._model.hidden(mx.array(self._ids[:rows, start:stop]), self._caches)
        self._pooled = self._pool(hidden.astype(mx.float32), start, stop, self._lengths[:rows])
        self._done = stop
        if stop == self._longest:
            self._pooled = self._model.vectors(self._finished(self._pooled))
            self._caches = None
        elif stop == self._shared:
            repeat_rows(self._caches or (), len(self._lengths))
        mx.eval(self._pooled, [cache.state for cache in self._caches or ()])
        return rows * (stop - start)

    def result(self) -> np.ndarray | None:
        """The vectors after the last columns."""
        return np.array(self._pooled) if self._done == self._longest else None

    def _pool(self, hidden: mx.array, start: int, stop: int, lengths: np.ndarray) -> mx.array:
        """The pooled states of all columns so far; one for all texts where they share the columns."""
        pooling, before = self._model.pooling, self._pooled
        columns = np.arange(start, stop)
        if pooling in ("last", "cls"):
            at = lengths - 1 if pooling == "last" else np.zeros_like(lengths)
            here = (at >= start) & (at < stop)
            places = mx.array(np.where(here, at - start, 0))[:, None, None]
            taken = mx.take_along_axis(hidden, places, axis=1)[:, 0]
            return taken if before is None else mx.where(mx.array(here)[:, None], taken, before)
        inside = mx.array(columns[None] < lengths[:, None])[..., None]
        if pooling == "max":
            most = mx.where(inside, hidden, -mx.inf).max(axis=1)
            return most if before is None else mx.maximum(before, most)
        total = mx.where(inside, hidden, 0).sum(axis=1)
        return total if before is None else before + total

    def _finished(self, pooled: mx.array) -> mx.array:
        if self._model.pooling != "mean":
            return pooled
        return pooled / mx.array(self._lengths)[:, None].astype(mx.float32)


def shared_columns(ids: np.ndarray) -> int:
    """How many of the first columns of (texts, columns) are the same in all texts, and worth a call of their own."""
    same = (ids == ids[:1]).all(axis=0)
    shared = int(same.argmin()) if not same.all() else len(same)
    return shared if len(ids) > 1 and shared >= SHARED_MIN else 0


def repeat_rows(caches: Iterable[Any], rows: int) -> None:
    """Make caches of one row those of `rows` such rows."""

    def repeated(part: Any) -> Any:
        # Beside arrays a state has numbers, such as an offset.
        return mx.repeat(part, rows, axis=0) if isinstance(part, mx.array) and part.ndim else part

    for cache in caches:
        cache.state = tree_map(repeated, cache.state)


def trunk_of(model: Any) -> Callable[..., Any]:
    """The part of a language model that ends with its last norm, before the product that makes logits.

    Raises `AttributeError` for a model that has none under the usual names.
    """
    if isinstance(model, DecoderModel):
        return model.hidden
    owner = getattr(model, "language_model", model)
    for name in ("model", "transformer", "backbone"):
        trunk = getattr(owner, name, None)
        if callable(trunk):
            return trunk  # type: ignore[no-any-return]
    raise AttributeError("no layers apart from the logits")


def hidden_width(model: Any) -> int:
    """Floats of a last hidden state; 0 if the model does not give them."""
    try:
        states = trunk_of(model)(mx.array([[0, 0]], dtype=mx.uint32))
        mx.eval(states)
        texts, tokens, width = states.shape
    except Exception:  # noqa: BLE001 - models are written in many ways; one without hidden states only generates
        return 0
    return int(width) if (texts, tokens) == (1, 2) else 0
