"""Index of blocks: the longest cached prefix of a prompt, and the order of eviction."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine.prefix_cache import index as index_module
from zmqengine.engine.prefix_cache.block import (
    BLOCK_TOKENS,
    Beginning,
    StoredBlock,
    block_keys,
    chained,
    salt_of,
)
from zmqengine.engine.prefix_cache.eviction import EvictionOrder
from zmqengine.engine.prefix_cache.index import BlockIndex, Node
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.prefix_cache.store import PrefixCache

SALT = salt_of(model="m")


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(32_000) for _ in range(length)]


def blocks(text: list[int]) -> list[StoredBlock]:
    keys = block_keys(text, SALT)
    rest = text[len(keys) * BLOCK_TOKENS :]
    if rest:
        keys.append(chained(keys[-1] if keys else SALT, rest))
    ids = np.array(text, np.uint32)
    starts = range(0, len(text), BLOCK_TOKENS)
    parents = [SALT, *keys]
    return [
        StoredBlock(key, parent, start, ids[start : start + BLOCK_TOKENS], ())
        for key, parent, start in zip(keys, parents, starts, strict=False)
    ]


def keep(index: BlockIndex, text: list[int]) -> list[Node]:
    return [node for block in blocks(text) if (node := index.add(block)) is not None]


def shared(index: BlockIndex, text: list[int]) -> int:
    return index.match(block_keys(text, SALT), np.array(text, np.uint32), SALT).tokens


@pytest.mark.parametrize("turn", [0, 1, 20, 64, 65, 127, 128, 200, 300])
def test_a_match_is_exact_to_the_token(turn):
    """Wherever a prompt turns off, within a block or between two."""
    index = BlockIndex()
    text = tokens(300)
    keep(index, text)
    other = [*text[:turn], *(32_000 + token for token in text[turn:])]
    assert shared(index, other) == turn
    match = index.match(block_keys(other, SALT), np.array(other, np.uint32), SALT)
    assert (match.differs is not None) == (0 < turn < 300)
    if match.differs is not None:
        following = text[turn : turn + len(match.differs)]
        assert match.differs.tolist() == following


def test_what_two_prompts_share_is_kept_once():
    """And a block goes only when nothing goes on from it."""
    index = BlockIndex()
    head = tokens(3 * BLOCK_TOKENS)
    first = keep(index, head + tokens(100, 1))
    second = keep(index, head + tokens(100, 2))
    assert (len(first), len(second), len(index), index.leaves) == (5, 2, 7, 2)
    with pytest.raises(AssertionError):
        index.remove(first[2])
    for node in [*reversed(second), *reversed(first[3:])]:
        index.remove(node)
    assert (len(index), index.leaves) == (3, 1)
    assert shared(index, head + tokens(100, 1)) == 3 * BLOCK_TOKENS


def test_a_block_without_the_one_before_it_is_not_kept():
    """A lookup goes from parent to child and would never find it."""
    index = BlockIndex()
    first, second, _ = blocks(tokens(150))
    assert index.add(second) is None
    assert index.add(first) is not None
    assert index.add(second) is not None
    assert index.add(second) is None


def test_a_look_up_costs_the_length_of_the_prompt(monkeypatch):
    """However many prompts begin alike: 3,000 turn off at the same place, in the middle of a block."""
    index = BlockIndex()
    head = tokens(2 * BLOCK_TOKENS + 10)
    for seed in range(3000):
        keep(index, head + tokens(20, seed))
    compared: list[int] = []
    shared_by = index_module._shared
    monkeypatch.setattr(
        index_module, "_shared", lambda nodes, rest: compared.append(len(nodes)) or shared_by(nodes, rest)
    )
    assert shared(index, head + [40_000] * 50) == len(head)
    assert sum(compared) <= 32
    assert shared(index, head + tokens(20, 2999)) == len(head) + 20


def test_the_least_recently_used_leaf_goes_first_unless_it_costs_more():
    """Of two prompts used at about the same time the one that is dearer to read again stays."""
    index, order = BlockIndex(), EvictionOrder()
    texts = [tokens(BLOCK_TOKENS, seed) for seed in range(4)]
    nodes = [node for text in texts for node in keep(index, text)]
    for node in [*nodes, nodes[0]]:
        order.use(node)
    assert order.next() is nodes[1]
    index.remove(nodes[1])
    nodes[2].holds = 1
    assert order.next() is nodes[3]
    index.remove(nodes[3])
    assert order.next() is nodes[0]
    index.remove(nodes[0])
    assert order.next() is None
    deep, shallow = keep(index, tokens(400 * BLOCK_TOKENS, 7)), keep(index, tokens(BLOCK_TOKENS, 8))
    for node in [*deep, *shallow]:
        order.use(node)
    assert order.next() is shallow[0]
    assert order.next() is deep[-1]


@pytest.mark.parametrize("room", [1, 2])
def test_restored_blocks_displace_others_and_not_their_own_prefix(room):
    """The block before them is held too, although it was used least recently; what does not fit is left out."""
    chain, other = blocks(tokens(2 * BLOCK_TOKENS)), blocks(tokens(BLOCK_TOKENS, 1))
    cache = PrefixCache(None, list, room * chain[0].bytes, {})
    for block in [chain[0], *other][:room]:
        assert cache.pool.add(block) is not None
    assert cache.insert_blocks(chain[1:], "a request") == (chain[1].end if room == 2 else 0)
    assert [node.block for node in cache.pool.index] == chain[:room]
    assert not cache.pool.evict()
    cache.release("a request")
    assert cache.limit(0) == room * chain[0].bytes


def test_eviction_of_a_leaf_leaves_a_parent_that_is_held():
    """Where caches cannot be cut, eviction of a leaf evicts its parents too, except those that a request holds."""
    pool = PrefixCache(None, list, 1 << 20, {}).pool
    nodes = [node for block in blocks(tokens(3 * BLOCK_TOKENS)) if (node := pool.add(block)) is not None]
    pool.hold(nodes[1], "a request")
    assert pool.evict()
    assert list(pool.index) == nodes[:2]
    assert not pool.evict()
    pool.release("a request")
    assert pool.evict()
    assert list(pool.index) == []


@pytest.mark.parametrize("value", [1.0, mx.nan])
def test_an_offer_behind_one_that_is_not_finite_is_withdrawn_too(value):
    """It may be finite, and was computed from it: here another row has added a valid block of the same tokens."""
    cache = PrefixCache(None, list, 1 << 20, {})
    whole = [
        replace(block, arrays=(mx.array([number]),))
        for block, number in zip(blocks(tokens(2 * BLOCK_TOKENS)), (value, 2.0), strict=True)
    ]
    offers = [Offer(0, Beginning(block.tokens, []), SALT, block.key, [block], None) for block in whole]
    cache._offers |= dict.fromkeys(offers)
    assert cache.pool.add(replace(whole[0], arrays=(mx.array([1.0]),))) is not None
    cache.prove(SimpleNamespace(offers=offers))  # type: ignore[arg-type]
    assert len(cache.pool.index) == (2 if value == 1.0 else 1)


def test_a_prompt_that_is_pinned_again_is_unpinned_last():
    """A pin beyond the limit unpins the prompt whose last pin is the oldest."""
    pool = PrefixCache(None, list, 1 << 20, {}).pool
    added = (pool.add(*blocks(tokens(BLOCK_TOKENS, seed))) for seed in range(3))
    first, second, third = (node for node in added if node is not None)
    bytes_max = 2 * first.block.bytes
    for node in (first, second, first, third):
        assert pool.pin(node, bytes_max)
    assert [node.holds for node in (first, second, third)] == [1, 0, 1]
