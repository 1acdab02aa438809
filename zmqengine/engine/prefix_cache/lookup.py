"""How much of a row is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zmqengine.engine.prefix_cache.branches import whole
from zmqengine.engine.prefix_cache.index import Match
from zmqengine.engine.prefix_cache.kept_blocks import KeptBlocks
from zmqengine.engine.prefix_cache.keys import BLOCK_TOKENS, block_keys, chained, salt_of
from zmqengine.engine.row import Row

PREFIX_TOKENS_MIN = 16
"""A shorter shared beginning is not worth a copy."""
_SCOPES_MAX = 4096


class Lookup:
    """Rows among the blocks that are kept. `facts` say what, beside tokens, decides what a model's caches hold."""

    def __init__(self, kept: KeptBlocks, facts: Mapping[str, str]) -> None:
        self._kept = kept
        self._facts = dict(facts)
        self._salts: dict[str, bytes] = {}

    def match(self, row: Row, tokens: int) -> Match:
        """How much is kept of the first `tokens` of what a row knows."""
        ids = row.ids if tokens <= len(row.ids) else np.asarray(row.tokens[:tokens], np.uint32)
        return self._kept.index.match(self.keys(row, whole(tokens)), ids[:tokens], self.salt(row.scope))

    def longest(self, row: Row) -> int:
        """How many tokens a row need not read."""
        length = self._kept.usable(self.match(row, len(row.ids) - 1))[1]
        return length if length >= PREFIX_TOKENS_MIN else 0

    def is_known(self, row: Row) -> bool:
        """Whether what a row holds now would tell nothing new, or is too little."""
        if row.held < PREFIX_TOKENS_MIN:
            return True
        if self._kept.cut_anywhere:
            return self.match(row, row.held).tokens == row.held
        node = self._kept.index.get(self.keys(row, row.held)[-1])
        return node is not None and node.block.checkpoint is not None

    def kept_tokens(self, keys: Sequence[bytes], tokens: int) -> int:
        """How many of `tokens` are kept in blocks of just these tokens; `keys` are those of all of them."""
        index = self._kept.index
        missing = next((place for place, key in enumerate(keys) if index.get(key) is None), len(keys))
        return min(tokens, missing * BLOCK_TOKENS)

    def salt(self, scope: str) -> bytes:
        """Root of the hash chain for prompts in this scope."""
        if scope not in self._salts:
            if len(self._salts) >= _SCOPES_MAX:
                self._salts.clear()
            self._salts[scope] = salt_of(**self._facts, scope=scope)
        return self._salts[scope]

    def keys(self, row: Row, tokens: int) -> list[bytes]:
        """Of the whole blocks of a row's first `tokens`, then of what is left of them."""
        count = tokens // BLOCK_TOKENS
        salt = self.salt(row.scope)
        if len(row.keys) < count:
            row.keys = block_keys(row.tokens[: count * BLOCK_TOKENS], salt, row.keys)
        keys = row.keys[:count]
        rest = row.tokens[count * BLOCK_TOKENS : tokens]
        return [*keys, chained(keys[-1] if keys else salt, rest)] if rest else keys
