"""Blocks of the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class Checkpoint(NamedTuple):
    """The whole state, after some tokens, of the layers that cannot be cut: sliding windows, recurrent states.

    `arrays` are MLX's; `form` is JSON that says where in the state each of them belongs.
    """

    form: str
    arrays: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """The tokens from `start` on in some prompt, at most `keys.BLOCK_TOKENS`, and what a model's caches hold of them.

    `arrays` are MLX's, the same number for every block of a model: each has (caches, 1, heads, tokens, width) of the
    layers whose caches can be cut at any token. `checkpoint` is the state of all other layers after the last token.
    A block with fewer tokens than `BLOCK_TOKENS` is the last one of its prompt.
    """

    key: bytes
    parent_key: bytes
    start: int
    tokens: np.ndarray
    arrays: tuple[Any, ...]
    checkpoint: Checkpoint | None = None

    @property
    def end(self) -> int:
        """How many tokens a prompt has that ends here."""
        return self.start + len(self.tokens)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the block, its tokens included."""
        kept: int = sum(array.nbytes for array in self.arrays) + int(self.tokens.nbytes)
        return kept + (self.checkpoint.bytes if self.checkpoint is not None else 0)

    def all_arrays(self) -> list[Any]:
        """Bytes with those of the checkpoint."""
        return [*self.arrays, *(self.checkpoint.arrays if self.checkpoint is not None else ())]


def total_bytes(blocks: Sequence[StoredBlock]) -> int:
    """Bytes of all of them."""
    return sum(block.bytes for block in blocks)
