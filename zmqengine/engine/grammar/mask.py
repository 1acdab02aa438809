"""Masks of the allowed next tokens, for all rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from zmqengine.engine.grammar.thinking import ThinkingMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from zmqengine.engine.grammar.matcher import RowMatcher

THREADS = 2
_BITS = 32
_ALL = 0xFFFFFFFF


class MaskFiller:
    """Masks of `vocab_size` tokens. A row without a matcher allows every token; until a row's constraint has begun,
    every token but `eos_token_ids` is allowed. A bound on reasoning rules out more of them.

    Masks are filled without the interpreter's lock, while the device computes.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // _BITS)
        allowed = np.zeros(self._words * _BITS, np.uint8)
        allowed[:vocab_size] = 1
        allowed[[id_ for id_ in eos_token_ids if id_ < vocab_size]] = 0
        self._endless = np.packbits(allowed, bitorder="little").view(np.uint32)

    def fill_windows(
        self,
        matchers: Sequence[RowMatcher | ThinkingMatcher | None],
        drafts: Sequence[Sequence[int]],
        width: int,
    ) -> np.ndarray:
        """Bits [rows * width, words], uint32, little-endian: of each row, for its next token and after each of its
        draft tokens.

        Draft tokens are allowed by the matcher. Positions after them allow every token.
        """
        bits = np.full((len(matchers) * width, self._words), _ALL, np.uint32)
        begun = []
        for index, matcher in enumerate(matchers):
            grammar = matcher.grammar if isinstance(matcher, ThinkingMatcher) else matcher
            if grammar is None:
                continue
            if grammar.begun:
                begun.append((grammar.parser, index * width, list(drafts[index])))
            else:
                bits[index * width : (index + 1) * width] = self._endless
        where = (bits.ctypes.data, self._words * bits.itemsize, len(bits))
        if single := [(parser, start) for parser, start, draft in begun if not draft]:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        if drafted := [each for each in begun if each[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for index, matcher in enumerate(matchers):
            if isinstance(matcher, ThinkingMatcher):
                matcher.restrict(bits[index * width : (index + 1) * width], drafts[index])
        return bits

    @cached_property
    def _executor(self) -> LLExecutor:
        # Imported here: a worker without constrained requests does not need the parser.
        from llguidance import LLExecutor

        return LLExecutor(THREADS)

    def apply(self, logits: mx.array, bits: np.ndarray) -> mx.array:
        """`logits` [rows, vocab] with minus infinity for every forbidden token."""
        return _masked(logits, mx.array(bits), _shifts())


@mx.compile
def _masked(logits: mx.array, bits: mx.array, shifts: mx.array) -> mx.array:
    """Minus infinity is added, not chosen: on a CPU a choice by bits that look random takes ten times as long."""
    spread = ((bits[:, :, None] >> shifts) & 1).reshape(bits.shape[0], -1)[:, : logits.shape[1]]
    return logits + mx.where(spread != 0, 0.0, -mx.inf).astype(logits.dtype)


@cache
def _shifts() -> mx.array:
    return mx.arange(_BITS, dtype=mx.uint32)
