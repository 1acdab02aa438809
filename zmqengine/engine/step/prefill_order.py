"""The rows that prefill now: a row waits for an older one that computes the beginning of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.prefix_cache.block import shared_tokens, whole
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row

# A row waits for an older one if that saves it this many tokens of prefill.
_LED_TOKENS_MIN = 256


def pick(rows: Sequence[Row], store: PrefixCache) -> list[Row]:
    """The rows that may prefill, the oldest first: not those whose beginning an older one computes, or has on offer.

    Sets `computed_tokens` of rows without caches to the length that the prefix cache may provide.
    """
    picked: list[Row] = []
    for row in rows:
        if row.cache is None:
            row.computed_tokens = store.longest(row)
            if store.longest_offered(row) >= row.computed_tokens + _LED_TOKENS_MIN:
                continue
            if any(_leads(older, row, store) for older in picked):
                continue
        picked.append(row)
    return picked


def _leads(older: Row, row: Row, store: PrefixCache) -> bool:
    """Whether `row` should wait for the tokens that `older` computes rather than compute them again."""
    if older.ids[0] != row.ids[0] or older.scope != row.scope or not store.may_keep(older):
        return False
    shared = shared_tokens(older.ids[:-1], row.ids[: row.first_forced - 1])
    if shared < row.computed_tokens + _LED_TOKENS_MIN:
        return False
    if not store.keeps_states:
        return True
    # A recurrent state can be reused only where it was kept, so the older row has to stop there.
    position = whole(shared)
    if position <= older.computed_tokens or position < row.computed_tokens + _LED_TOKENS_MIN:
        return False
    older.branches = sorted({*older.branches, position})
    return True
