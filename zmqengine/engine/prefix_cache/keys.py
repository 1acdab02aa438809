"""Names of the beginnings of prompts: chained hashes of blocks of tokens, the same in every process."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 64
"""Tokens of a whole block. Two prompts hold what they share once as far as it is whole blocks, so these are small."""
KEY_BYTES = 16


def salt_of(**facts: str) -> bytes:
    """What the first block of a prompt is chained to. Caches are alike only where all facts are: name the model, its
    quantisation, the tokenizer, and the scope within which prompts are shared."""
    salt = hashlib.blake2b(digest_size=KEY_BYTES)
    for name, value in sorted(facts.items()):
        for part in (name, value):
            encoded = part.encode()
            salt.update(len(encoded).to_bytes(4, "little") + encoded)
    return salt.digest()


def block_keys(tokens: Sequence[int], salt: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of all whole blocks of `tokens`, the first one's first. `known` are those of its beginning."""
    keys = list(known)
    packed = memoryview(array("I", tokens)).cast("B")
    size = 4 * BLOCK_TOKENS
    key = keys[-1] if keys else salt
    for start in range(size * len(keys), len(packed) - size + 1, size):
        key = _chain(key, packed[start : start + size])
        keys.append(key)
    return keys


def chained(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that follows the one of `parent_key`, or begins a prompt where that is a salt."""
    return _chain(parent_key, array("I", tokens).tobytes())


def _chain(parent_key: bytes, packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, key=parent_key, digest_size=KEY_BYTES).digest()
