"""The forward pass of decoder-only transformers, whose layers are in models/families.

`forward` reads like the model: embed, then for each layer attention and MLP, then the last norm. The tokens of a step
are one flat list, whatever rows they belong to, so a layer's weights are read once for all of them; only attention
knows rows. The computation from one attention to the next is the same in every step of as many tokens. On a GPU it is
traced once for each number of tokens (`mx.compile`) and replayed in one call, on CUDA with the attention before it;
layers that differ only in the values of their arrays share a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.architecture import (
    Before,
    DecoderLayer,
    DecoderWeights,
    LayerInputs,
    Mixer,
    Stream,
)
from zmqengine.engine.models.layers import HeadShape, Linear, Norm
from zmqengine.engine.models.mixing import Mixing
from zmqengine.engine.models.ops import AddedProducts, Ops, PlainOps, by_look_up
from zmqengine.engine.models.positions import Axes, angles
from zmqengine.engine.models.tree import arrays_of, filled, kind_of

# LRU bound on traces, by number of tokens and kind of attention; those made at a start are extra. Each takes some 150
# KiB, and 1.4 ms to make again (pico, 2 cores). In 827 steps of random requests of four APIs a bound of 32 repeated
# none of 37; 16 repeated 27. Packed steps on CUDA add one for each number of rows up to 64, and four for each doubling
# of a chunk.
_TRACES_MAX = 128
# Maximum tokens of a step with adapters that is replayed. More are those of a prompt: their products outlast the launch
# of each operation, and where they have one adapter they need no look-up.
_ADAPTED_TOKENS_MAX = 64

Traced = Callable[..., Sequence[Any]]
Queries = dict[int, mx.array]
"""Rotated queries [tokens, heads, dim] by layer."""


class Inputs(NamedTuple):
    """The tokens of a step, padded. Arrays are those of `Ops.array`.

    `positions`: [tokens], or [3, tokens] for images. `wanted`: indices of the tokens whose hidden states are used.
    `embeddings` [tokens, dim] stand in place of those of the tokens, where some are features of images. `deep`: numbers
    [tokens, dim] to add to the hidden states behind each of the first layers. `deltas`: what adapters add to products.
    """

    tokens: Any
    positions: Any
    wanted: Any
    embeddings: mx.array | None = None
    deep: Sequence[mx.array] = ()
    deltas: AddedProducts | None = None


class HiddenStates(NamedTuple):
    """Hidden states of a forward pass: `last` [wanted, dim] after the last norm, and of each tap [tokens, dim]."""

    last: Any
    tapped: list[Any]


class DecoderModel:
    """A model on the operations of one back-end. With `replays`, layers are traced and replayed.

    `taps`: numbers of layers, each after how many the hidden states of all tokens are results too; in rising order.
    """

    def __init__(
        self, weights: DecoderWeights, ops: Ops, *, replays: bool = False, taps: Sequence[int] = ()
    ) -> None:
        self.weights = weights
        self.taps = taps
        self.layers = weights.layers
        self.ops = ops
        self.axes: Axes | None = None
        """Axes of the model, where it has three positions for a token."""
        self.mixing = Mixing(ops, [layer.mixer for layer in weights.layers], weights.sources)
        self.replays = replays
        self._traces = _Traces(self, weights)
        self._adapted_layers = weights.layers
        self._adapted_traces = self._traces

    def adapt(self, weights: DecoderWeights) -> None:
        """Steps with `deltas` have these weights from now on: those of the model, with factors."""
        self._adapted_layers = weights.layers
        self._adapted_traces = _Traces(self, weights)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, dim] of tokens [rows, width]."""
        hidden = self.ops.embed(self.ops.array(np.asarray(tokens).reshape(-1)), self.weights.embedding)
        return mx.array(hidden).reshape(*tokens.shape, -1)

    def forward(self, inputs: Inputs, layout: Any, queries: Queries | None = None) -> HiddenStates:
        """Hidden states of a step. `layout`: where the tokens lie, from `mixing.begin`.

        With a tap after all layers, all tokens have to be wanted. `queries` gets those of layers that see every column.
        """
        is_plain = inputs.embeddings is None and not inputs.deep and len(inputs.positions.shape) == 1
        is_short = inputs.deltas is None or inputs.tokens.shape[0] <= _ADAPTED_TOKENS_MAX
        if self.replays and is_plain and is_short and queries is None:
            traces = self._traces if inputs.deltas is None else self._adapted_traces
            return traces.replay(inputs, layout)
        self.ops.deltas = inputs.deltas
        try:
            return self._computed(inputs, layout, queries)
        finally:
            self.ops.deltas = None

    def _computed(self, inputs: Inputs, layout: Any, queries: Queries | None) -> HiddenStates:
        ops, positions = self.ops, inputs.positions
        if len(positions.shape) == 2:
            assert self.axes is not None, "the model has three positions for a token"
            positions = angles(positions, self.axes, self.mixing.rotation)
        layers = self.layers if inputs.deltas is None else self._adapted_layers
        stream, own = begin(ops, self.weights, inputs.tokens, inputs.embeddings)
        last = len(layers) - 1
        tapped = []
        for number, layer in enumerate(layers):
            before = layer.before(ops, stream, positions)
            if number in self.taps:
                tapped.append(before.hidden)
            if queries is not None and sees_every_column(layer.mixer):
                queries[number] = _queries(before.mixing, layer.mixer, positions)
            mixed = self.mixing.mix(layout, number, before.mixing)
            beside = own[number] if own else ()
            if number == last:
                stream = at_end(ops, layer, before, mixed, beside, inputs.wanted)
            else:
                stream = layer.after(ops, before, mixed, beside)
            if number < len(inputs.deep):
                deep = inputs.deep[number] if number < last else inputs.deep[number][inputs.wanted]
                stream = Stream(stream.total(ops), deep.astype(stream.hidden.dtype))
        total, normed = stream.summed(ops, self.weights.norm)
        return HiddenStates(normed, [*tapped, total] if last + 1 in self.taps else tapped)

    def logits(self, hidden: Any) -> Any:
        """Logits [tokens, vocab] of hidden states after the last norm."""
        logits = self.ops.product(hidden, self.weights.head)
        return logits if self.weights.logits_cap is None else self.ops.cap(logits, self.weights.logits_cap)

    def trace(self, sizes: Sequence[int], until_s: float) -> None:
        """Trace steps of these numbers of tokens, until `until_s` on the clock of `time.perf_counter`."""
        for tokens in sizes:
            if time.perf_counter() > until_s:
                return
            self._traces.make_ahead(tokens)


def sees_every_column(mixer: Mixer) -> TypeGuard[HeadShape]:
    """Whether a layer attends to every column of a row."""
    return isinstance(mixer, HeadShape) and mixer.window is None


def _queries(mixing: Sequence[Any], heads: HeadShape, positions: Any) -> mx.array:
    """Rotated queries [tokens, heads, dim] from the arguments of the mixing, which may be a joined product."""
    rotated = mixing if len(mixing[0].shape) == 3 else PlainOps().rotate(mixing[0], heads, positions)
    return mx.array(rotated[0])


def begin(
    ops: Ops, weights: DecoderWeights | _Begin, tokens: Any, embeddings: Any = None
) -> tuple[Stream, list[tuple[Any, ...]]]:
    """The hidden states before the first layer, and the inputs that each layer has of its own, if any has."""
    hidden = embedded(ops, weights, tokens, embeddings)
    if weights.layer_inputs is None:
        return Stream(hidden), []
    return Stream(hidden), [(each,) for each in weights.layer_inputs.compute(ops, tokens, hidden)]


def embedded(ops: Ops, weights: DecoderWeights | _Begin, tokens: Any, embeddings: Any = None) -> Any:
    """The scaled embeddings of tokens, or `embeddings` scaled in their place."""
    hidden = ops.embed(tokens, weights.embedding) if embeddings is None else embeddings
    return hidden if weights.embedding_scale == 1.0 else hidden * weights.embedding_scale


def at_end(
    ops: Ops, layer: DecoderLayer, before: Before, mixed: Any, own: tuple[Any, ...], wanted: Any
) -> Stream:
    """The hidden states after the last layer, of the tokens whose states are used."""
    if ops.deltas is not None:
        ops.deltas = ops.deltas.chosen(wanted)
    chosen = Before(before.hidden[wanted], (), tuple(each[wanted] for each in before.kept))
    return layer.after(ops, chosen, mixed[wanted], tuple(each[wanted] for each in own))


class _Begin(NamedTuple):
    """Weights before the first attention."""

    embedding: Linear
    embedding_scale: float
    layer_inputs: LayerInputs | None
    following: DecoderLayer


class _Between(NamedTuple):
    """Weights between two attentions."""

    layer: DecoderLayer
    following: DecoderLayer


class _End(NamedTuple):
    """Weights behind the last attention."""

    layer: DecoderLayer
    norm: Norm


class _Traces:
    """Traced parts of a decoder, by number of tokens and kind of attention.

    A part begins with the attention of a layer, where that is replayed too, or behind it. It ends with the joined
    product of the next layer, rotated unless attention does that itself.
    """

    def __init__(self, decoder: DecoderModel, weights: DecoderWeights) -> None:
        layers = weights.layers
        self._decoder = decoder
        self._ops = decoder.ops
        self._mixing = decoder.mixing
        self._parts: list[Any] = [
            _Begin(weights.embedding, weights.embedding_scale, weights.layer_inputs, layers[0])
        ]
        self._parts += [_Between(layer, following) for layer, following in pairwise(layers)]
        self._parts.append(_End(layers[-1], weights.norm))
        self._kinds: list[Hashable] = [kind_of(part) for part in self._parts]
        self._arrays = [arrays_of(part) for part in self._parts]
        self._calls: dict[Hashable, list[Traced]] = {}
        self._most = _TRACES_MAX

    def replay(self, inputs: Inputs, layout: Any) -> HiddenStates:
        """See `Decoder.forward`."""
        mixing_of, positions = self._mixing, inputs.positions
        kind = mixing_of.kind(layout)
        deltas = inputs.deltas
        calls = self._calls_for(inputs.tokens.shape[0], kind, adapted=deltas is not None)
        if deltas is not None:
            calls = [partial(call, deltas.looked_up) for call in calls]
        (hidden, mixing, kept), own = calls[0](inputs.tokens, positions)
        last = len(calls) - 2
        taps, tapped = self._decoder.taps, []
        for number, call in enumerate(calls[1:]):
            if number in taps:
                tapped.append(hidden)
            behind = mixing_of.behind(layout, number, mixing)
            rest = inputs.wanted if number == last else positions
            hidden, mixing, kept = call(rest, own[number] if own else (), hidden, kept, *behind)
        return HiddenStates(hidden, [*tapped, *mixing])

    def make_ahead(self, tokens: int) -> None:
        """Trace steps of as many tokens. They count for no bound, and no array is computed."""
        for layout in self._mixing.examples(tokens):
            kind = self._mixing.kind(layout)
            if (tokens, kind, False) not in self._calls:
                self._most += 1
                self._trace(self._calls_for(tokens, kind), tokens, layout)

    def _trace(self, calls: Sequence[Traced], tokens: int, layout: Any) -> None:
        positions = mx.zeros((tokens,), mx.int32)
        (hidden, mixing, kept), own = calls[0](mx.zeros((tokens,), mx.uint32), positions)
        made: dict[Hashable, Any] = {}
        for number, (alike, call) in enumerate(zip(self._kinds[1:], calls[1:], strict=True)):
            if alike not in made:
                behind = self._mixing.example_behind(layout, number, mixing, tokens)
                made[alike] = call(positions, own[number] if own else (), hidden, kept, *behind)
            hidden, mixing, kept = made[alike]

    def _calls_for(self, tokens: int, kind: Hashable, *, adapted: bool = False) -> list[Traced]:
        calls = self._calls.pop((tokens, kind, adapted), None) or self._made(kind, adapted=adapted)
        # The last one is the last in use.
        self._calls[tokens, kind, adapted] = calls
        return calls

    def _made(self, kind: Hashable, *, adapted: bool) -> list[Traced]:
        while len(self._calls) >= self._most:
            # MLX frees a trace with its function.
            del self._calls[next(iter(self._calls))]
        by_kind: dict[Hashable, Traced] = {}
        calls: list[Traced] = []
        for part, alike, arrays in zip(self._parts, self._kinds, self._arrays, strict=True):
            if alike not in by_kind:
                by_kind[alike] = self._compiled(part, kind, adapted=adapted)
            calls.append(partial(by_kind[alike], arrays))
        return calls

    def _compiled(self, part: Any, kind: Hashable, *, adapted: bool) -> Traced:
        ops, mixing = self._ops, self._mixing
        taps_end = len(self._decoder.layers) in self._decoder.taps

        def first(arrays: list[mx.array], tokens: mx.array, positions: mx.array) -> Any:
            weights: _Begin = filled(part, iter(arrays))
            stream, own = begin(ops, weights, tokens)
            return tuple(weights.following.before(ops, stream, positions)), own

        def between(
            arrays: list[mx.array],
            positions: mx.array,
            own: tuple[mx.array, ...],
            hidden: mx.array,
            kept: tuple[mx.array, ...],
            *behind: mx.array,
        ) -> Any:
            weights: _Between = filled(part, iter(arrays))
            mixed = mixing.mix_replayed(kind, weights.layer.mixer, behind)
            stream = weights.layer.after(ops, Before(hidden, (), kept), mixed, own)
            return tuple(weights.following.before(ops, stream, positions))

        def end(
            arrays: list[mx.array],
            wanted: mx.array,
            own: tuple[mx.array, ...],
            hidden: mx.array,
            kept: tuple[mx.array, ...],
            *behind: mx.array,
        ) -> Any:
            weights: _End = filled(part, iter(arrays))
            mixed = mixing.mix_replayed(kind, weights.layer.mixer, behind)
            stream = at_end(ops, weights.layer, Before(hidden, (), kept), mixed, own, wanted)
            total, normed = stream.summed(ops, weights.norm)
            return normed, (total,) if taps_end else (), ()

        parts: dict[type, Traced] = {_Begin: first, _Between: between, _End: end}
        call = parts[type(part)]
        return mx.compile(partial(_with_adapters, ops, call) if adapted else call)


def _with_adapters(ops: Ops, call: Traced, arrays: list[mx.array], looked_up: mx.array, *more: Any) -> Any:
    """A traced part with the products that adapters add for tokens of these numbers."""
    ops.deltas = TracedDeltas(looked_up)
    try:
        return call(arrays, *more)
    finally:
        ops.deltas = None


class TracedDeltas:
    """`AddedProducts` by look-up alone, as a trace holds for any adapters."""

    def __init__(self, looked_up: mx.array) -> None:
        self.looked_up = looked_up

    def chosen(self, tokens: mx.array) -> TracedDeltas:
        """See `AddedProducts`."""
        return TracedDeltas(self.looked_up[tokens])

    def add(self, outputs: mx.array, inputs: mx.array, linear: Linear) -> mx.array:
        """See `AddedProducts`."""
        return outputs if linear.down is None else outputs + by_look_up(inputs, linear, self.looked_up)
