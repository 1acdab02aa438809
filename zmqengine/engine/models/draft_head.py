"""A head that drafts: one more layer behind the model's last one (multi-token prediction, EAGLE-3).

From the hidden state of token t and token t + 1 a head predicts token t + 2: both are normed, joined, and pass a
decoder layer and a norm. For the token after that, the head's own output takes the place of the hidden state. A model's
own head takes the hidden state after the model's last norm; a drafter that looks inside the model takes one product of
those after some of its layers (`taps`). Embedding and vocabulary are the model's, or the head's own.

Its keys and values are one more layer of a row's slot. The pair of hidden state t and token t + 1 has column t. Of n
computed tokens the first n - 1 columns are complete; the hidden state of the last token is carried (`kv.slots.Carry`)
to the step that knows the next one. Drafts write columns from n - 1 on, and the next step writes over them.

So the columns of a prefix depend on one token more. Where prompts part at the end of a block of the prefix cache, or a
block was cut at its row's last token, its last column is another prompt's or empty: that costs acceptance alone.

A drafter that fills a block at once (DFlash) has a few layers. Of each token that the model has computed, its keys and
values are products of one state, the model's hidden states after some layers, joined: those of token t have column t. A
draft is one pass over the last known token and as many mask tokens as the block has. All of them see each other, and
the columns before; what comes out at a mask token gives the logits of the token in its place.

Gemma 4's assistants are heads without keys and values: their layers read those of the model's last layer of each kind,
with and without a window, as far as they are computed. All tokens of a draft have the position of the last known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from zmqengine.engine.kv.slots import ArrayShape, KVShape
from zmqengine.engine.models.architecture import Before, DecoderLayer, Mixer, Stream
from zmqengine.engine.models.attention import WIDTH_MAX, PlacedPiece, SlotAttention
from zmqengine.engine.models.decoder import DecoderModel, HiddenStates, embedded
from zmqengine.engine.models.layers import HeadShape, Linear, Norm, Unsupported
from zmqengine.engine.models.ops import Ops
from zmqengine.engine.models.positions import Axes, angles
from zmqengine.engine.models.tree import arrays_of


class HeadVocabulary(NamedTuple):
    """Weights in place of the model's: an `embedding`, and a vocabulary `product`, whose outputs are the logits of the
    tokens `targets`; None for all in order."""

    embedding: Linear | None = None
    product: Linear | None = None
    targets: mx.array | None = None


class PairWeights(Protocol):
    """Weights of a head: a named tuple of arrays. `taps`: as those of `DecoderModel`; none where it takes the model's
    output."""

    @property
    def taps(self) -> Sequence[int]:
        """See above."""
        ...

    @property
    def mixer(self) -> Mixer:
        """How its layer mixes tokens."""
        ...

    @property
    def norm(self) -> Norm:
        """The norm before its vocabulary product."""
        ...

    @property
    def vocabulary(self) -> HeadVocabulary:
        """Weights in place of the model's embedding and vocabulary."""
        ...

    def states(self, ops: Ops, hidden: HiddenStates) -> Any:
        """The hidden states [tokens, dim] that it takes, of a forward pass of the model."""
        ...

    def before(self, ops: Ops, embeddings: Any, hidden: Any, positions: Any) -> Before:
        """From embeddings of tokens and the hidden states before them to queries, keys and values."""
        ...

    def after(self, ops: Ops, before: Before, mixed: Any) -> tuple[Any, Any]:
        """The head's output, which takes the place of the hidden state, and the same after its norm."""
        ...


class HeadWeights(NamedTuple):
    """Weights of a model's own head. `join` [dim, 2 dim] takes embedding and hidden state, each after its norm;
    `hidden_first`: hidden state and embedding."""

    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    layer: DecoderLayer
    norm: Norm
    hidden_first: bool = False
    vocabulary: HeadVocabulary = HeadVocabulary()

    @property
    def taps(self) -> Sequence[int]:
        """See `PairWeights`."""
        return ()

    @property
    def mixer(self) -> Mixer:
        """See `PairWeights`."""
        return self.layer.mixer

    def states(self, ops: Ops, hidden: HiddenStates) -> Any:
        """See `PairWeights`."""
        return hidden.last

    def before(self, ops: Ops, embeddings: Any, hidden: Any, positions: Any) -> Before:
        """See `PairWeights`."""
        pair = [ops.norm(embeddings, self.embedding_norm), ops.norm(hidden, self.hidden_norm)]
        if self.hidden_first:
            pair.reverse()
        joined = ops.product(mx.concatenate(pair, axis=-1), self.join)
        return self.layer.before(ops, Stream(joined), positions)

    def after(self, ops: Ops, before: Before, mixed: Any) -> tuple[Any, Any]:
        """See `PairWeights`."""
        outputs = self.layer.after(ops, before, mixed, ()).summed(ops, self.norm)[1]
        return outputs, outputs


def check_head(weights: PairWeights, ops: Ops) -> HeadShape:
    """The shape of a head's attention. Raises `Unsupported` for one that is not computed on `ops`."""
    if not isinstance(weights.mixer, HeadShape):
        raise Unsupported("the head's layer is no attention")
    if not ops.on_mlx:
        raise Unsupported("NumPy does not compute heads")
    if not ops.attends_beside([weights.mixer]):
        raise Unsupported("its attention has other kernels than the model's: --kernels mlx computes both")
    return weights.mixer


class DraftHead:
    """A head of a decoder, on its operations. `layers`: the number of its keys and values among those of a slot.

    `moves`: each draft token has a column behind the last one; its position is `ahead` of that.
    """

    moves, ahead = True, 0

    def __init__(self, weights: PairWeights, decoder: DecoderModel) -> None:
        mixer, last = check_head(weights, decoder.ops), weights.norm.weight
        self.weights = weights
        self.shapes = [KVShape(mixer.key_heads, mixer.dim, mixer.dtype)]
        self.carry = ArrayShape(last.shape, last.dtype)
        self.layers = [len(decoder.mixing.shapes)]
        self.parameter_bytes = sum(array.nbytes for array in arrays_of(weights))
        self.takes_all = not weights.taps or weights.taps[-1] == len(decoder.layers)
        """Whether it takes hidden states after the last layer, so that all tokens pass that."""
        self._mixer = mixer
        self._decoder = decoder
        self._attention = decoder.ops.attention([mixer], self.layers)

    @property
    def axes(self) -> Axes | None:
        """Axes of the model, where the head's tokens have three positions."""
        return None if self.weights.taps else self._decoder.axes

    def embed(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """The embeddings [tokens, dim] that the head takes, by default those of the model."""
        of = self.weights.vocabulary.embedding
        if of is None and embeddings is not None:
            return embeddings
        found: mx.array = self._decoder.ops.embed(tokens, of or self._decoder.weights.embedding)
        return found

    def states(self, hidden: HiddenStates) -> mx.array:
        """The hidden states [tokens, dim] that it takes, of a forward pass of the model."""
        states: mx.array = self.weights.states(self._decoder.ops, hidden)
        return states

    def prime(
        self, pieces: Sequence[PlacedPiece], embeddings: mx.array, hidden: mx.array, positions: mx.array
    ) -> mx.array:
        """Write keys and values of pairs: `hidden` states [tokens, dim] and `embeddings` of the tokens after them.
        Returns what attention gives: kernels that write in place have written when it is computed."""
        attended: mx.array = self._attend(pieces, embeddings, hidden, positions)[1]
        return attended

    def advance(
        self, pieces: Sequence[PlacedPiece], tokens: mx.array, hidden: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """For pairs of `hidden` states and the `tokens` after them: what takes the place of the hidden states of the
        next pairs [tokens, dim], and what gives the `logits` of the tokens after those."""
        before, mixed = self._attend(pieces, self.embed(tokens), hidden, positions)
        return self.weights.after(self._decoder.ops, before, mixed)

    def logits(self, outputs: mx.array) -> mx.array:
        """Logits [tokens, vocab] of outputs."""
        own = self.weights.vocabulary
        if own.product is None:
            logits: mx.array = self._decoder.logits(outputs)
            return logits
        logits = self._decoder.ops.product(outputs, own.product)
        if own.targets is None:
            return logits
        every = mx.full((len(outputs), self._decoder.weights.head.outputs), -mx.inf, logits.dtype)
        every[:, own.targets] = logits
        return every

    def _attend(
        self, pieces: Sequence[PlacedPiece], embeddings: mx.array, hidden: mx.array, positions: mx.array
    ) -> Any:
        turns: Any = positions
        if positions.ndim == 2:
            assert self.axes is not None, "the model has three positions for a token"
            assert self._mixer.rotation is not None, "a model with positions rotates by them"
            turns = angles(positions, self.axes, self._mixer.rotation)
        before = self.weights.before(self._decoder.ops, embeddings, hidden, turns)
        layout = self._attention.begin(pieces, hidden.shape[0])
        return before, self._attention.attend(layout, 0, before.mixing)


class BlockWeights(NamedTuple):
    """Weights of such a drafter. `join` [dim, states' dims] and `join_norm`: the model's hidden states to one state.

    `taps`: as those of `DecoderModel`. `block`: tokens that it fills, the known one included; `mask`: the mask token.
    """

    join: Linear
    join_norm: Norm
    layers: tuple[Any, ...]
    norm: Norm
    taps: tuple[int, ...]
    block: int
    mask: int


class DraftBlock:
    """Such a drafter of a decoder, on its operations. `layers`: the numbers of its keys and values in a slot."""

    carry = None
    axes = None

    def __init__(self, weights: BlockWeights, decoder: DecoderModel) -> None:
        self.weights = weights
        mixers = check_block(weights, decoder.ops)
        first = len(decoder.mixing.shapes)
        self.layers = range(first, first + len(mixers))
        self.shapes = [KVShape(each.key_heads, each.dim, each.dtype) for each in mixers]
        self.parameter_bytes = sum(array.nbytes for array in arrays_of(weights))
        self.takes_all = weights.taps[-1] == len(decoder.layers)
        self.width = min(weights.block, WIDTH_MAX)
        """Tokens of its block here: the longest piece whose rows attend together."""
        self._decoder = decoder
        self._attention = decoder.ops.attention(mixers, self.layers)

    def states(self, hidden: HiddenStates) -> mx.array:
        """The state [tokens, dim] of each token of a forward pass of the model."""
        ops, weights = self._decoder.ops, self.weights
        joined = ops.product(mx.concatenate(hidden.tapped, axis=-1), weights.join)
        states: mx.array = ops.norm(joined, weights.join_norm)
        return states

    def keep(self, pieces: Sequence[PlacedPiece], states: mx.array, positions: mx.array) -> None:
        """Write keys and values of tokens, by their states."""
        ops = self._decoder.ops
        layout = self._attention.begin(pieces, len(states))
        for number, layer in enumerate(self.weights.layers):
            inputs = ops.rotate(ops.product(states, *layer.inputs), layer.mixer, positions)
            # Its outputs are not used, so they are never computed.
            self._attention.attend(layout, number, inputs)

    def fill(self, pieces: Sequence[PlacedPiece], tokens: mx.array, positions: mx.array) -> mx.array:
        """Outputs [tokens, dim] of blocks, whose pieces see all of their own tokens."""
        ops = self._decoder.ops
        hidden = embedded(ops, self._decoder.weights, tokens)
        return _through(self.weights, ops, self._attention, pieces, hidden, positions)

    def logits(self, outputs: mx.array) -> mx.array:
        """Logits [tokens, vocab] of outputs."""
        logits: mx.array = self._decoder.logits(outputs)
        return logits


def check_block(weights: BlockWeights, ops: Ops) -> list[HeadShape]:
    """The shapes of such a drafter's attention. Raises `Unsupported` for one that is not computed on `ops`."""
    if not ops.on_mlx or ops.storage().writes_in_place:
        raise Unsupported("kernels that write in place do not compute drafters: --kernels mlx does")
    return [layer.mixer for layer in weights.layers]


class WordClusters(NamedTuple):
    """The `kept` clusters of words that `product` finds likeliest; the others are left out. `of_word` [words]: the
    cluster of each."""

    product: Linear
    of_word: mx.array
    kept: int


class AssistantWeights(NamedTuple):
    """Weights of an assistant: `begin` takes the model's embedding and its last hidden state, `end` makes one from its
    own. `head`: its vocabulary product."""

    begin: Linear
    layers: tuple[Any, ...]
    norm: Norm
    end: Linear
    head: Linear
    clusters: WordClusters | None = None

    @property
    def taps(self) -> Sequence[int]:
        """See `PairWeights`."""
        return ()


class DraftAssistant:
    """An assistant of a decoder, on its operations. It has no keys and values of its own.

    All draft tokens see the columns of what is computed, from the position behind.
    """

    moves, ahead = False, 1
    axes = None
    takes_all = True
    shapes: Sequence[KVShape] = ()
    layers: Sequence[int] = ()

    def __init__(self, weights: AssistantWeights, decoder: DecoderModel) -> None:
        self.weights = weights
        model = decoder.weights
        self.carry = ArrayShape(model.norm.weight.shape, model.norm.weight.dtype)
        self.parameter_bytes = sum(array.nbytes for array in arrays_of(weights))
        self._decoder = decoder
        mixers, caches = check_assistant(weights, decoder)
        self._attention = decoder.ops.attention(mixers, caches)

    def states(self, hidden: HiddenStates) -> mx.array:
        """The hidden states [tokens, dim] that it takes, of a forward pass of the model."""
        states: mx.array = hidden.last
        return states

    def advance(
        self, pieces: Sequence[PlacedPiece], tokens: mx.array, hidden: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """See `DraftHead.advance`. `pieces` end at the last column that is read."""
        ops, weights = self._decoder.ops, self.weights
        pair = mx.concatenate([embedded(ops, self._decoder.weights, tokens), hidden], axis=-1)
        begun = ops.product(pair, weights.begin)
        outputs = _through(weights, ops, self._attention, pieces, begun, positions)
        return ops.product(outputs, weights.end), outputs

    def logits(self, outputs: mx.array) -> mx.array:
        """Logits [tokens, vocab] of outputs."""
        ops, clusters = self._decoder.ops, self.weights.clusters
        logits: mx.array = ops.product(outputs, self.weights.head)
        if clusters is None:
            return logits
        scores = ops.product(outputs, clusters.product)
        least = mx.sort(scores, axis=-1)[:, -clusters.kept, None]
        chosen = (scores >= least)[:, clusters.of_word]
        return mx.where(chosen, logits, mx.array(-mx.inf, logits.dtype))


def check_assistant(weights: AssistantWeights, decoder: DecoderModel) -> tuple[list[HeadShape], list[int]]:
    """The shapes of an assistant's attention, and the keys and values of the model that each layer reads.

    Raises `Unsupported` where the model has no such ones.
    """
    if not decoder.ops.on_mlx or decoder.ops.storage().writes_in_place:
        raise Unsupported("kernels that write in place do not compute drafters: --kernels mlx does")
    mixers = [layer.mixer for layer in weights.layers]
    caches = []
    for mixer in mixers:
        alike = [
            number
            for number, layer in enumerate(decoder.layers)
            if isinstance(layer.mixer, HeadShape) and (layer.mixer.window is None) == (mixer.window is None)
        ]
        read = decoder.layers[alike[-1]].mixer if alike else None
        if not isinstance(read, HeadShape) or (read.key_heads, read.dim) != (mixer.key_heads, mixer.dim):
            raise Unsupported("the model's last layers have keys and values of another shape")
        caches.append(decoder.mixing.caches[alike[-1]])
    return mixers, caches


def _through(
    weights: BlockWeights | AssistantWeights,
    ops: Ops,
    attention: SlotAttention,
    pieces: Sequence[PlacedPiece],
    hidden: mx.array,
    positions: mx.array,
) -> mx.array:
    """Outputs [tokens, dim] after the layers and the last norm of a drafter, of `hidden` states before them."""
    stream, layout = Stream(hidden), attention.begin(pieces, len(hidden))
    for number, layer in enumerate(weights.layers):
        before = layer.before(ops, stream, positions)
        stream = layer.after(ops, before, attention.attend(layout, number, before.mixing), ())
    outputs: mx.array = stream.summed(ops, weights.norm)[1]
    return outputs


AnyWeights = PairWeights | BlockWeights | AssistantWeights
AnyHead = DraftHead | DraftBlock | DraftAssistant
