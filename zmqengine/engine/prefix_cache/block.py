"""Blocks of the prefix cache, and the chain of hashes that names them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

BLOCK_TOKENS = 64
"""Tokens of a whole block. Prompts share whole blocks only, hence the small size."""
PREFIX_TOKENS_MIN = 16
"""A shorter shared prefix is not worth a copy."""
KEY_BYTES = 16
Tokens = Sequence[int] | np.ndarray


class Checkpoint(NamedTuple):
    """State, after the last token of a block, of the layers that cannot be cut: sliding windows, recurrent states.

    `arrays` are MLX's; `form` is JSON that gives the place of each in the state.
    """

    form: str
    arrays: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self.arrays)


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """At most `BLOCK_TOKENS` tokens of a prompt, from `start` on, and their part of the KV cache.

    `arrays` are MLX's, the same number in every block of a model, each of shape (caches, 1, heads, tokens, width), for
    the layers that can be cut at any token. A block of fewer than `BLOCK_TOKENS` tokens is the last of its prompt.
    """

    key: bytes
    parent_key: bytes
    start: int
    tokens: np.ndarray
    arrays: tuple[Any, ...]
    checkpoint: Checkpoint | None = None

    @property
    def end(self) -> int:
        """Tokens of a prompt that ends with this block."""
        return self.start + len(self.tokens)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the block, tokens and checkpoint included."""
        taken: int = sum(each.nbytes for each in self.arrays) + int(self.tokens.nbytes)
        return taken + (self.checkpoint.bytes if self.checkpoint is not None else 0)

    @property
    def buffers(self) -> int:
        """Number of arrays, each a buffer of the device."""
        return len(self.arrays) + (0 if self.checkpoint is None else len(self.checkpoint.arrays))

    def all_arrays(self) -> list[Any]:
        """Arrays of the block, then those of its checkpoint."""
        return [*self.arrays, *(self.checkpoint.arrays if self.checkpoint is not None else ())]


def salt_of(**facts: str) -> bytes:
    """Root of a chain of hashes. Prompts share blocks only where all facts are equal: model, quantisation, scope."""
    salt = hashlib.blake2b(digest_size=KEY_BYTES)
    for name, value in sorted(facts.items()):
        for part in (name, value):
            encoded = part.encode()
            salt.update(len(encoded).to_bytes(4, "little") + encoded)
    return salt.digest()


def block_keys(tokens: Tokens, salt: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of all whole blocks of `tokens` in order. `known`: the first of them, not to be hashed again."""
    keys = list(known)
    packed = memoryview(_packed(tokens))
    size = 4 * BLOCK_TOKENS
    key = keys[-1] if keys else salt
    for start in range(size * len(keys), len(packed) - size + 1, size):
        key = _chain(key, packed[start : start + size])
        keys.append(key)
    return keys


def chained(parent_key: bytes, tokens: Tokens) -> bytes:
    """Key of the block of `tokens` after the block, or the salt, `parent_key`."""
    return _chain(parent_key, _packed(tokens))


def _packed(tokens: Tokens) -> bytes:
    return np.asarray(tokens, np.uint32).tobytes()


def whole(tokens: int) -> int:
    """Tokens in the whole blocks of a prompt of `tokens`."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


class Beginning(NamedTuple):
    """The first tokens of a row, and the keys of their whole blocks."""

    tokens: np.ndarray
    keys: Sequence[bytes]

    def shared(self, other: Beginning) -> int:
        """Length of the common prefix. A key stands for all tokens up to its block, so tokens are compared in one."""
        ours, theirs = self.keys, other.keys
        blocks = bisect_left(
            range(min(len(ours), len(theirs))), True, key=lambda index: ours[index] != theirs[index]
        )
        block = slice(blocks * BLOCK_TOKENS, (blocks + 1) * BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS + shared_tokens(self.tokens[block], other.tokens[block])


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _chain(parent_key: bytes, packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, key=parent_key, digest_size=KEY_BYTES).digest()
