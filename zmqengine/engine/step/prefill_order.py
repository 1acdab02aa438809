"""The rows that prefill now: a row waits for an older one that computes the beginning of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, whole
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row

# A row waits for an older one if that saves it this many tokens of prefill.
_LED_TOKENS_MIN = 256


def pick(rows: Sequence[Row], store: PrefixCache) -> list[Row]:
    """The rows that may prefill, the oldest first: not those whose beginning an older one computes, or has on offer.

    Sets `computed_tokens` of rows without caches to the length that the prefix cache may provide.
    """
    picked: list[Row] = []
    # Picked rows by the keys of their blocks, for the rows behind them.
    leaders: dict[bytes, list[Row]] = {}
    for number, row in enumerate(rows):
        if row.cache is None and row.is_cacheable:
            prefix = store.prefix(row)
            row.computed_tokens = prefix.cached
            least = row.computed_tokens + _LED_TOKENS_MIN
            if prefix.offered >= least:
                continue
            keys = store.beginning(row, row.first_forced - 1).keys[least // BLOCK_TOKENS - 1 :]
            if keys and any(_leads(older, row, store) for older in leaders.get(keys[0], ())):
                continue
        picked.append(row)
        if number + 1 < len(rows) and store.may_keep(row):
            for key in store.beginning(row, len(row.ids) - 1).keys:
                leaders.setdefault(key, []).append(row)
    return picked


def _leads(older: Row, row: Row, store: PrefixCache) -> bool:
    """Whether `row` should wait for the tokens that `older` computes rather than compute them again."""
    beginning = store.beginning(row, row.first_forced - 1)
    shared = store.beginning(older, len(older.ids) - 1).shared(beginning)
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
