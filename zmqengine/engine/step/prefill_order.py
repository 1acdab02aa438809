"""Which rows may read their prompt now, and which had better wait for others that read the same."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.prefix_cache.block import shared_tokens, whole
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row

# A row waits for an older one if that saves it from reading so many tokens.
_LED_TOKENS_MIN = 256


def pick(rows: Sequence[Row], store: PrefixCache) -> list[Row]:
    """The rows that may read, the oldest first: not those whose beginning an older one reads, or has on offer.

    Rows that have not begun are told how much they may hope for.
    """
    picked: list[Row] = []
    for row in rows:
        if row.caches is None:
            row.held = store.longest(row)
            if store.longest_offered(row) >= row.held + _LED_TOKENS_MIN:
                continue
            if any(_leads(older, row, store) for older in picked):
                continue
        picked.append(row)
    return picked


def _leads(older: Row, row: Row, store: PrefixCache) -> bool:
    """Whether `row` had better wait for what `older` reads than read the same tokens again."""
    if older.ids[0] != row.ids[0] or older.scope != row.scope or not store.may_keep(older):
        return False
    shared = shared_tokens(older.ids[:-1], row.ids[:-1])
    if shared < row.held + _LED_TOKENS_MIN:
        return False
    if not store.keeps_states:
        return True
    # A state is good only where it was kept, so the older row has to stop there.
    position = whole(shared)
    if position <= older.held or position < row.held + _LED_TOKENS_MIN:
        return False
    older.branches = sorted({*older.branches, position})
    return True
