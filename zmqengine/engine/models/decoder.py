"""The forward pass of decoder-only transformers: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

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
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.slots import KVShape
from zmqengine.engine.models.decoder_weights import DecoderWeights, Layer, Linear, Norm
from zmqengine.engine.models.ops import Ops
from zmqengine.engine.models.positions import Axes, angles
from zmqengine.engine.models.tree import arrays_of, filled, kind_of

# LRU bound on traces, by number of tokens and kind of attention; those made at a start are extra. Each takes some 150
# KiB, and 1.4 ms to make again (pico, 2 cores). In 827 steps of random requests of four APIs a bound of 32 repeated
# none of 37; 16 repeated 27. Packed steps on CUDA add one for each number of rows up to 64, and four for each doubling
# of a chunk.
_TRACES_MAX = 128

Traced = Callable[..., Sequence[Any]]


class Inputs(NamedTuple):
    """The tokens of a step, padded. Arrays are those of `Ops.array`.

    `positions`: [tokens], or [3, tokens] for images. `wanted`: indices of the tokens whose hidden states are used.
    `embeddings` [tokens, dim] stand in place of those of the tokens, where some are features of images. `deep`: numbers
    [tokens, dim] to add to the hidden states behind each of the first layers.
    """

    tokens: Any
    positions: Any
    wanted: Any
    embeddings: mx.array | None = None
    deep: Sequence[mx.array] = ()


class DecoderModel:
    """A model of the family on the operations of one back-end. With `replays`, layers are traced and replayed."""

    def __init__(self, weights: DecoderWeights, ops: Ops, *, replays: bool = False) -> None:
        self.weights = weights
        self.layers = weights.layers
        self.ops = ops
        self.axes: Axes | None = None
        """Axes of the model, where it has three positions for a token."""
        self.heads = [layer.heads for layer in weights.layers]
        self.attention = ops.attention(self.heads)
        self.shapes = [KVShape(heads.key_heads, heads.dim, heads.dtype) for heads in self.heads]
        self.replays = replays
        self._traces = _Traces(self)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, dim] of tokens [rows, width]."""
        hidden = self.ops.embed(self.ops.array(np.asarray(tokens).reshape(-1)), self.weights.embedding)
        return mx.array(hidden).reshape(*tokens.shape, -1)

    def forward(self, inputs: Inputs, layout: Any) -> Any:
        """Hidden states [wanted, dim] after the last norm.

        `layout`: where the tokens lie, from `attention.begin`.
        """
        is_plain = inputs.embeddings is None and not inputs.deep and len(inputs.positions.shape) == 1
        if self.replays and is_plain:
            return self._traces.replay(inputs, layout)
        ops, attention = self.ops, self.attention
        turned = None
        if len(inputs.positions.shape) == 2:
            assert self.axes is not None, "the model has three positions for a token"
            turned = angles(inputs.positions, self.axes, self.heads[0].rotation)
        hidden = inputs.embeddings
        if hidden is None:
            hidden = ops.embed(inputs.tokens, self.weights.embedding)
        normed = ops.norm(hidden, self.layers[0].input_norm)
        last = len(self.layers) - 1
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms_after, strict=True)):
            product = ops.product(normed, *layer.qkv)
            if turned is None:
                qkv = ops.rotate(product, layer.heads, inputs.positions)
            else:
                qkv = ops.turn(product, layer.heads, turned)
            attended = attention.attend(layout, number, qkv)
            if number == last:
                hidden, attended = hidden[inputs.wanted], attended[inputs.wanted]
            hidden, normed = after_attention(ops, layer, norm, hidden, attended)
            if number < len(inputs.deep):
                deep = inputs.deep[number] if number < last else inputs.deep[number][inputs.wanted]
                hidden = hidden + deep.astype(hidden.dtype)
                normed = ops.norm(hidden, norm)
        return normed

    def logits(self, hidden: Any) -> Any:
        """Logits [tokens, vocab] of hidden states after the last norm."""
        return self.ops.product(hidden, self.weights.head)

    @property
    def norms_after(self) -> list[Norm]:
        """The norm behind each layer: that of the next layer, or the last one."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.weights.norm]

    def trace(self, sizes: Sequence[int], until_s: float) -> None:
        """Trace steps of these numbers of tokens, until `until_s` on the clock of `time.perf_counter`."""
        for tokens in sizes:
            if time.perf_counter() > until_s:
                return
            self._traces.make_ahead(tokens)


def after_attention(ops: Ops, layer: Layer, norm: Norm, hidden: Any, attended: Any) -> tuple[Any, Any]:
    """The hidden states after a layer, and these after the next `norm`."""
    hidden, normed = ops.add_and_norm(hidden, ops.product(attended, layer.out), layer.mlp_norm)
    return ops.add_and_norm(hidden, ops.mlp(normed, layer.mlp), norm)


class _Begin(NamedTuple):
    """Weights before the first attention."""

    embedding: Linear
    norm: Norm
    following: Layer


class _Between(NamedTuple):
    """Weights between two attentions."""

    layer: Layer
    norm: Norm
    following: Layer


class _End(NamedTuple):
    """Weights behind the last attention."""

    layer: Layer
    norm: Norm


class _Traces:
    """Traced parts of a decoder, by number of tokens and kind of attention.

    A part begins with the attention of a layer, where that is replayed too, or behind it. It ends with the joined
    product of the next layer, rotated unless attention does that itself.
    """

    def __init__(self, decoder: DecoderModel) -> None:
        layers, weights = decoder.layers, decoder.weights
        self._decoder = decoder
        self._ops = decoder.ops
        self._attention: Any = decoder.attention
        self._parts: list[Any] = [_Begin(weights.embedding, layers[0].input_norm, layers[0])]
        self._parts += [
            _Between(layer, following.input_norm, following) for layer, following in pairwise(layers)
        ]
        self._parts.append(_End(layers[-1], weights.norm))
        self._kinds: list[Hashable] = [kind_of(part) for part in self._parts]
        self._arrays = [arrays_of(part) for part in self._parts]
        self._calls: dict[Hashable, list[Traced]] = {}
        self._most = _TRACES_MAX

    def replay(self, inputs: Inputs, layout: Any) -> mx.array:
        """See `Decoder.forward`."""
        attention, positions = self._attention, inputs.positions
        kind = layout.kind if attention.is_replayed else None
        calls = self._calls_for(inputs.tokens.shape[0], kind)
        hidden: mx.array
        hidden, *qkv = calls[0](inputs.tokens, positions)
        last = len(calls) - 2
        for number, call in enumerate(calls[1:]):
            rest = [inputs.wanted] if number == last else [positions]
            if attention.is_replayed:
                hidden, *qkv = call(hidden, *rest, *qkv, *layout.shared, *layout.layers[number])
            else:
                hidden, *qkv = call(hidden, *rest, attention.attend(layout, number, qkv))
        return hidden

    def make_ahead(self, tokens: int) -> None:
        """Trace steps of as many tokens. They count for no bound, and no array is computed."""
        for layout in self._attention.examples(tokens) if self._attention.is_replayed else [None]:
            kind = None if layout is None else layout.kind
            if (tokens, kind) not in self._calls:
                self._most += 1
                self._trace(self._calls_for(tokens, kind), tokens, layout)

    def _trace(self, calls: Sequence[Traced], tokens: int, layout: Any) -> None:
        positions = mx.zeros((tokens,), mx.int32)
        hidden, *qkv = calls[0](mx.zeros((tokens,), mx.uint32), positions)
        done = set()
        for number, (part, alike, call) in enumerate(
            zip(self._parts[1:], self._kinds[1:], calls[1:], strict=True)
        ):
            if alike in done:
                continue
            done.add(alike)
            heads = part.layer.heads
            if layout is None:
                behind = [mx.zeros((tokens, heads.heads * heads.dim), heads.dtype)]
            else:
                behind = [*qkv, *layout.shared, *layout.layers[number]]
            call(hidden, positions, *behind)

    def _calls_for(self, tokens: int, kind: Hashable) -> list[Traced]:
        calls = self._calls.pop((tokens, kind), None) or self._made(kind)
        # The last one is the last in use.
        self._calls[tokens, kind] = calls
        return calls

    def _made(self, kind: Hashable) -> list[Traced]:
        while len(self._calls) >= self._most:
            # MLX frees a trace with its function.
            del self._calls[next(iter(self._calls))]
        by_kind: dict[Hashable, Traced] = {}
        calls: list[Traced] = []
        for part, alike, arrays in zip(self._parts, self._kinds, self._arrays, strict=True):
            if alike not in by_kind:
                by_kind[alike] = self._compiled(part, kind)
            calls.append(partial(by_kind[alike], arrays))
        return calls

    def _compiled(self, part: Any, kind: Hashable) -> Traced:
        ops, attention = self._ops, self._attention

        def begin(arrays: list[mx.array], tokens: mx.array, positions: mx.array) -> Sequence[mx.array]:
            weights: _Begin = filled(part, iter(arrays))
            hidden = ops.embed(tokens, weights.embedding)
            product = ops.product(ops.norm(hidden, weights.norm), *weights.following.qkv)
            return hidden, *ops.rotate(product, weights.following.heads, positions)

        def attended_of(layer: Layer, behind: Sequence[mx.array]) -> mx.array:
            if not attention.is_replayed:
                return behind[0]
            found: mx.array = attention.attend_replayed(kind, layer.heads, *behind)
            return found

        def between(
            arrays: list[mx.array], hidden: mx.array, positions: mx.array, *behind: mx.array
        ) -> Sequence[mx.array]:
            weights: _Between = filled(part, iter(arrays))
            attended = attended_of(weights.layer, behind)
            hidden, normed = after_attention(ops, weights.layer, weights.norm, hidden, attended)
            product = ops.product(normed, *weights.following.qkv)
            return hidden, *ops.rotate(product, weights.following.heads, positions)

        def end(
            arrays: list[mx.array], hidden: mx.array, wanted: mx.array, *behind: mx.array
        ) -> Sequence[mx.array]:
            weights: _End = filled(part, iter(arrays))
            attended = attended_of(weights.layer, behind)
            chosen = hidden[wanted], attended[wanted]
            return (after_attention(ops, weights.layer, weights.norm, *chosen)[1],)

        parts: dict[type, Traced] = {_Begin: begin, _Between: between, _End: end}
        return mx.compile(parts[type(part)])
