"""Which tokens of a prompt matter, by the attention of a draft model that has read it (arXiv 2502.02789).

The queries of the prompt's last token and of tokens that the draft model adds look at the keys of the whole prompt, in
every layer that sees all of it. A token's importance is the highest share that a head of any layer gives it, averaged
over its neighbours before and over the queries after. Chunks of the prompt are kept by their mean importance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.slots import Slot
from zmqengine.engine.models.attention import capped
from zmqengine.engine.models.decoder import Queries
from zmqengine.engine.models.layers import HeadShape
from zmqengine.engine.models.slot_runner import SlotRunner

LOOK_AHEAD = 8
"""Queries, the size of the paper's configurations."""
CHUNK_TOKENS = 32
"""Tokens of a chunk, as in the paper's configurations."""
# Neighbours on each side in the average of a share: the paper's window of 13.
_NEIGHBOURS = 6


def importance(runner: SlotRunner, slot: Slot, tokens: int, queries: Sequence[Queries]) -> np.ndarray:
    """The importance [tokens] of the first `tokens` in a slot, whose keys are computed, to some later queries."""
    highest = [mx.zeros((tokens,)) for _ in queries]
    mixing = runner.decoder.mixing
    for layer in queries[0]:
        heads = runner.decoder.layers[layer].mixer
        assert isinstance(heads, HeadShape), "layers with queries have heads"
        keys = runner.slots.copy(slot, [(mixing.caches[layer], "keys")], 0, tokens)[0, 0]
        for number, of_layers in enumerate(queries):
            shares = _smoothed(attention_shares(of_layers[layer][0], keys, heads))
            highest[number] = mx.maximum(highest[number], shares.max(axis=0))
        # One layer at a time: each has the keys of the whole prompt.
        mx.eval(highest)
    return np.array(sum(highest) / len(highest))


def attention_shares(query: mx.array, keys: mx.array, heads: HeadShape) -> mx.array:
    """Shares [heads, tokens] of a query [heads, dim] over keys [key heads, tokens, dim]."""
    grouped = query.reshape(heads.key_heads, -1, heads.dim).astype(mx.float32)
    scores = (grouped @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(heads.heads, -1) * heads.scale
    if heads.cap is not None:
        scores = capped(scores, heads.cap)
    if heads.sinks is not None:
        scores = mx.concatenate([scores, heads.sinks.astype(mx.float32)[:, None]], axis=1)
    return mx.softmax(scores, axis=-1)[:, : keys.shape[1]]


def _smoothed(shares: mx.array) -> mx.array:
    """The average of each share [heads, tokens] and its neighbours."""
    tokens = shares.shape[1]
    padded = mx.pad(shares, [(0, 0), (_NEIGHBOURS, _NEIGHBOURS)])
    total = sum(padded[:, first : first + tokens] for first in range(2 * _NEIGHBOURS + 1))
    places = np.arange(tokens)
    counts = np.minimum(places, _NEIGHBOURS) + np.minimum(tokens - 1 - places, _NEIGHBOURS) + 1
    return total / mx.array(counts.astype(np.float32))


def kept_tokens(scores: np.ndarray, share: float) -> np.ndarray:
    """Indices of the tokens of the most important chunks, at least `share` of all; the last chunk is always kept.

    What follows the prompt is predicted from its last token.
    """
    tokens = len(scores)
    chunks = [np.arange(begin, min(begin + CHUNK_TOKENS, tokens)) for begin in range(0, tokens, CHUNK_TOKENS)]
    means = np.array([scores[chunk].mean(dtype=np.float64) for chunk in chunks])
    # Of equals the first.
    best = np.argsort(-means[:-1], kind="stable")
    wanted, kept = math.ceil(share * tokens), [len(chunks) - 1]
    count = len(chunks[-1])
    for index in best.tolist():
        if count >= wanted:
            break
        kept.append(index)
        count += len(chunks[index])
    return np.concatenate([chunks[index] for index in sorted(kept)])
