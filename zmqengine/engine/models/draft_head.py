"""The head by which a model drafts for itself: one more layer behind its last one (multi-token prediction).

From the hidden state of token t, after the model's last norm, and token t + 1 a head predicts token t + 2: both are
normed, joined and projected to one hidden state, which passes a decoder layer and a norm. The embedding and the
vocabulary product are the model's. For the token after that, the head's own output takes the place of the hidden state.

Its keys and values are one more layer of a row's slot. The pair of hidden state t and token t + 1 has column t. Of n
computed tokens the first n - 1 columns are complete; the hidden state of the last token is carried (`kv.slots.Carry`)
to the step that knows the next one. Drafts write columns from n - 1 on, and the next step writes over them.

So the columns of a prefix depend on one token more. Where prompts part at the end of a block of the prefix cache, or a
block was cut at its row's last token, its last column is another prompt's or empty: that costs acceptance alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.kv.slots import ArrayShape, KVShape
from zmqengine.engine.models.architecture import DecoderLayer, Stream
from zmqengine.engine.models.attention import PlacedPiece
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.layers import HeadShape, Linear, Norm, Unsupported
from zmqengine.engine.models.positions import angles
from zmqengine.engine.models.tree import arrays_of


class HeadWeights(NamedTuple):
    """Weights of a head. `join` [dim, 2 dim] takes the embedding and the hidden state, each after its norm."""

    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    layer: DecoderLayer
    norm: Norm


class DraftHead:
    """The head of a decoder, on its operations. `layer`: the number of its keys and values among those of a slot."""

    def __init__(self, weights: HeadWeights, decoder: DecoderModel) -> None:
        mixer = weights.layer.mixer
        if not isinstance(mixer, HeadShape):
            raise Unsupported("the head's layer is no attention")
        if decoder.ops.storage().writes_in_place:
            raise Unsupported("kernels that write in place do not compute heads: --kernels mlx does")
        last = decoder.weights.norm.weight
        self.weights = weights
        self.shape = KVShape(mixer.key_heads, mixer.dim, mixer.dtype)
        self.carry = ArrayShape(last.shape, last.dtype)
        self.layer = len(decoder.mixing.shapes)
        self.parameter_bytes = sum(array.nbytes for array in arrays_of(weights))
        self._mixer = mixer
        self._decoder = decoder
        self._attention = decoder.ops.attention([mixer], [self.layer])

    def prime(
        self, pieces: Sequence[PlacedPiece], embeddings: mx.array, hidden: mx.array, positions: mx.array
    ) -> None:
        """Write keys and values of pairs: `hidden` states [tokens, dim] and `embeddings` of the tokens after them."""
        self._attend(pieces, embeddings, hidden, positions)

    def advance(
        self, pieces: Sequence[PlacedPiece], tokens: mx.array, hidden: mx.array, positions: mx.array
    ) -> mx.array:
        """Outputs [tokens, dim] for pairs of `hidden` states and the `tokens` after them; their product with the
        vocabulary gives the logits of the tokens after those."""
        ops, weights = self._decoder.ops, self.weights
        embeddings = ops.embed(tokens, self._decoder.weights.embedding)
        before, mixed = self._attend(pieces, embeddings, hidden, positions)
        outputs: mx.array = weights.layer.after(ops, before, mixed, ()).summed(ops, weights.norm)[1]
        return outputs

    def _attend(
        self, pieces: Sequence[PlacedPiece], embeddings: mx.array, hidden: mx.array, positions: mx.array
    ) -> Any:
        ops, weights = self._decoder.ops, self.weights
        turns: Any = positions
        if positions.ndim == 2:
            assert self._decoder.axes is not None, "the model has three positions for a token"
            assert self._mixer.rotation is not None, "a model with positions rotates by them"
            turns = angles(positions, self._decoder.axes, self._mixer.rotation)
        pair = [ops.norm(embeddings, weights.embedding_norm), ops.norm(hidden, weights.hidden_norm)]
        joined = ops.product(mx.concatenate(pair, axis=-1), weights.join)
        before = weights.layer.before(ops, Stream(joined), turns)
        layout = self._attention.begin(pieces, hidden.shape[0])
        return before, self._attention.attend(layout, 0, before.mixing)
