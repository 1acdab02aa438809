"""Chain of hashes: prompts have equal keys up to the block in which they differ."""

from __future__ import annotations

import random

from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, block_keys, chained, salt_of

SALT = salt_of(model="m", scope="")


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1 << 31) for _ in range(length)]


def test_a_key_stands_for_all_that_came_before_it():
    """One token that differs changes the key of its block and of all that follow."""
    text = tokens(5 * BLOCK_TOKENS + 3)
    keys = block_keys(text, SALT)
    assert len(set(keys)) == 5
    text[2 * BLOCK_TOKENS + 7] ^= 1
    assert [one == other for one, other in zip(keys, block_keys(text, SALT), strict=True)] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_keys_can_be_made_piece_by_piece():
    """What is known need not be hashed again, and a short block is named like a whole one."""
    text = tokens(4 * BLOCK_TOKENS)
    keys = block_keys(text, SALT)
    assert block_keys(text, SALT, keys[:2]) == keys
    assert chained(keys[2], text[3 * BLOCK_TOKENS :]) == keys[3]
    assert chained(keys[2], text[3 * BLOCK_TOKENS : -1]) != keys[3]
    assert chained(SALT, text[:BLOCK_TOKENS]) == keys[0]


def test_salts_differ_where_a_fact_does():
    """Also where the same letters are divided in another way."""
    salts = [
        salt_of(model="m", scope=""),
        salt_of(model="", scope="m"),
        salt_of(model="ab", scope="c"),
        salt_of(model="a", scope="bc"),
        salt_of(model="m"),
    ]
    assert len(set(salts)) == len(salts)
    assert salt_of(scope="", model="m") == SALT
    assert not set(block_keys(tokens(200), salts[0])) & set(block_keys(tokens(200), salts[1]))
