"""Which tokens may come next, for the rows of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor

from zmqengine.engine.constraints.matcher import RowMatcher

THREADS = 2
_BITS = 32


class MaskFiller:
    """Masks of `vocab_size` tokens; until a row's constraint has begun, all but `eos_token_ids` may come.

    `fill` runs without the interpreter's lock and beside whatever the device computes.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // _BITS)
        self._executor = LLExecutor(THREADS)
        allowed = np.zeros(self._words * _BITS, np.uint8)
        allowed[:vocab_size] = 1
        allowed[[id_ for id_ in eos_token_ids if id_ < vocab_size]] = 0
        self._free = np.packbits(allowed, bitorder="little").view(np.uint32)

    def fill(self, matchers: Sequence[RowMatcher]) -> np.ndarray:
        """Bits of shape [rows, words of 32], uint32, little end first."""
        bits = np.empty((len(matchers), self._words), np.uint32)
        begun = [(matcher.parser, place) for place, matcher in enumerate(matchers) if matcher.begun]
        for place, matcher in enumerate(matchers):
            if not matcher.begun:
                bits[place] = self._free
        if begun:
            self._executor.unsafe_compute_mask_ptr(
                begun, bits.ctypes.data, self._words * bits.itemsize, len(matchers)
            )
        return bits

    def fill_windows(
        self, matchers: Sequence[RowMatcher], drafts: Sequence[Sequence[int]], width: int
    ) -> np.ndarray:
        """Bits of shape [rows * width, words]: of each row for its next token, and after each token of its draft.

        A draft is allowed by its matcher. What comes after its end is free.
        """
        bits = np.empty((len(matchers) * width, self._words), np.uint32)
        bits[:] = self._free
        places = [(matcher, place * width, list(drafts[place])) for place, matcher in enumerate(matchers)]
        begun = [(matcher.parser, start, draft) for matcher, start, draft in places if matcher.begun]
        where = (bits.ctypes.data, self._words * bits.itemsize, len(bits))
        if single := [(parser, start) for parser, start, draft in begun if not draft]:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        if drafted := [each for each in begun if each[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        return bits

    def apply(self, logits: mx.array, bits: np.ndarray) -> mx.array:
        """`logits` of shape [rows, vocab] with minus infinity for every token that may not come."""
        return _masked(logits, mx.array(bits), _shifts())


@mx.compile
def _masked(logits: mx.array, bits: mx.array, shifts: mx.array) -> mx.array:
    """Minus infinity is added, not chosen: on a CPU a choice by bits that look random takes ten times as long."""
    spread = ((bits[:, :, None] >> shifts) & 1).reshape(bits.shape[0], -1)[:, : logits.shape[1]]
    return logits + mx.where(spread != 0, 0.0, -mx.inf).astype(logits.dtype)


@cache
def _shifts() -> mx.array:
    return mx.arange(_BITS, dtype=mx.uint32)
