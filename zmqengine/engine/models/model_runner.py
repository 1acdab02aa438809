"""The contract between the step and a model with the KV caches of its rows.

`SlotRunner` runs our own decoder, all pieces of a step in one forward pass over slots. `MlxLmRunner` runs mlx-lm's code
for every other model, on mlx-lm's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.block_layout import BlockLayout, Parts
from zmqengine.engine.row import Row


class FeatureSource(Protocol):
    """Features of images in the place of tokens."""

    @property
    def deep_layers(self) -> int:
        """Layers behind which features are added."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, dim] of tokens [rows, width], as the text model takes them."""
        ...

    def features_of(
        self, row: Row, start: int, count: int
    ) -> list[tuple[np.ndarray, mx.array, list[mx.array]]]:
        """Features among `count` tokens of a row from `start` on: their columns, numbers [features, dim], and those to
        add behind each of the first layers."""
        ...


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Consecutive tokens of a row that one step computes: `count` of them from index `start` on.

    `samples`: its last tokens whose logits are sampled from. `scored`: first and last + 1 of its tokens whose logits
    give log-probabilities of forced tokens, relative to `start`. `pooled`: its hidden states are wanted instead.
    """

    row: Row
    start: int
    count: int
    samples: int = 0
    scored: tuple[int, int] = (0, 0)
    pooled: bool = False


class Outputs(NamedTuple):
    """Results of a forward pass, not computed yet.

    `logits`: [rows, width, vocab] of the pieces that sample, in their order; shorter ones repeat their last token.
    `scored`: logits [tokens, vocab] of each piece with `scored` tokens; `hidden`: hidden states [tokens, dim] of each
    `pooled` piece, after the last norm. `marker`: an array that is computed once all keys and values are written;
    `started`: what to start with it.
    """

    logits: mx.array | None
    scored: list[mx.array]
    hidden: list[mx.array]
    marker: mx.array
    started: Sequence[mx.array] = ()


class ModelRunner(Protocol):
    """A model and the caches of its rows. `Row.cache` is what `open` returned; only the runner looks inside."""

    @property
    def launches_ahead(self) -> bool:
        """Whether a step may be launched before the one before has landed; see `engine/kv`."""
        ...

    @property
    def batches(self) -> bool:
        """Whether several rows are stepped in one call."""
        ...

    @property
    def ends_apart(self) -> bool:
        """Whether the last token of a prompt has to be a piece of its own: all logits of a piece are computed, or
        states are kept before it."""
        ...

    @property
    def rolls_back(self) -> bool:
        """Whether a step may compute several tokens of a row in decode, of which some are computed again."""
        ...

    @property
    def blocks(self) -> BlockLayout | None:
        """How caches are cut into blocks of the prefix cache; None if they cannot be, for the `uncacheable_reason`."""
        ...

    @property
    def uncacheable_reason(self) -> str:
        """Why there are no blocks; empty if there are."""
        ...

    @property
    def padding_bytes_max(self) -> int:
        """Maximum bytes of padding of all rows."""
        ...

    def open(self, tokens: int) -> Any:
        """An empty cache for a row of `tokens`."""
        ...

    def restore(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Any:
        """A cache that holds the first `tokens` of `parts`, for a row of `room` tokens."""
        ...

    def forward(
        self, pieces: Sequence[RowPiece], tokens: mx.array, width: int, seeing: FeatureSource | None = None
    ) -> Outputs:
        """Build the forward pass of all pieces; `tokens` are theirs, in order. `width`: most `samples` of a piece.

        A row with a piece of one token that samples is in decode.
        """
        ...

    def cut(self, tokens: int) -> int:
        """Tokens of the next piece of a prompt, of which `tokens` may be computed now."""
        ...

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of the cache of a row of `tokens`, without padding."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of the caches of all rows."""
        ...

    def trim(self, empty_bytes_max: int, ahead_bytes: int, waiting: Sequence[int]) -> int:
        """Free allocated memory that neither rows have nor those that wait, of as many tokens, will take, if it is more
        than `empty_bytes_max`; returns the bytes of what is left, and of copies that rows need. From now on at most
        `ahead_bytes` are allocated for rows to come."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of caches that MLX does not count."""
        ...

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding, at most `padding_bytes_max`."""
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes of the largest arrays that a join or a longer row copies."""
        ...

    def clear(self) -> None:
        """Drop the caches of all rows."""
        ...


class RowCache(Protocol):
    """The cache of a row."""

    @property
    def bytes(self) -> int:
        """Bytes of the cache."""
        ...

    def park(self) -> None:
        """Make it independent of rows that are stepped, until its row is back."""
        ...

    def close(self, *, is_finite: bool) -> None:
        """Free it. `is_finite`: the row's last logit was."""
        ...
