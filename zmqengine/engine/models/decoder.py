"""The forward pass of the dense decoder family, Llama, Mistral, Qwen2 and Qwen3, and of Qwen3-MoE.

Hidden states are a flat list of tokens: norms, products and rotations compute on all tokens at once. Only attention
knows rows; each segment of a packed step attends with its own caches. A call with mlx-lm's interface is a step of one
segment.

The computation from one attention to the next is the same in every step: it is traced once for each number of rows
(`mx.compile`) and replayed in one call. Where attention can be traced, it is a part of that call. Layers that differ
only in the values of their arrays share a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.decoder_weights import DecoderWeights, HeadShape, Layer, Linear, Norm
from zmqengine.engine.models.mlx_lm import RotatingKVCache
from zmqengine.engine.models.ops import (
    QKV,
    Ops,
    PackedAttention,
    StepAttention,
    TracedAttention,
    rotate_by,
)
from zmqengine.engine.models.positions import Axes, angles
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.models.tree import arrays_of, filled, kind_of

WIDTH_MAX = 8
"""Maximum width of a traced step; wider ones are prompts, which have too many lengths to trace."""

# Traces, by number of rows, width and kind of attention, that are kept beside those made ahead. Each takes some 150
# KiB, and 1.4 ms to make again (pico, 2 cores). In 827 steps of random requests of four APIs a bound of 32 repeated
# none of 37; 16 repeated 27. Packed steps on CUDA add one for each number of rows up to 64, and four for each doubling
# of a chunk.
_SHAPES_MAX = 128

Traced = Callable[..., Sequence[mx.array]]


class DecoderModel:
    """A model of the family, with the interface of mlx-lm's models. Caches are mlx-lm's or those of a `KVBatch`."""

    def __init__(self, weights: DecoderWeights, ops: Ops, *, traces_attention: bool = True) -> None:
        self.layers = weights.layers
        self.weights = weights
        self.ops = ops
        self.axes: Axes | None = None
        """Axes of the model, where it has three positions for a token."""
        self.heads = [layer.heads for layer in weights.layers]
        windows = [heads.window for heads in self.heads]
        # Window (None for full attention) -> the first layer that has it: such layers share a mask.
        self.windows = [(window, windows.index(window)) for window in dict.fromkeys(windows)]
        self.traced_attention = ops.traced_attention(self.heads) if traces_attention else None
        """Attention inside the traces of the layers; None where it is a call of its own."""
        self._packed_attention = ops.packed_attention(self.heads) if traces_attention else None
        self.packs_texts = self._packed_attention is not None
        """Whether texts side by side in one segment attend in one call."""
        self._traces = _Traces(weights, ops, self.traced_attention, self._packed_attention)
        step_ops = ops.step_ops(weights)
        self._steps: DecoderModel | None = None
        """The model that computes decode steps at once, with the same weights; None where it is this one."""
        if step_ops is not None:
            in_numpy: Any = filled(weights, map(np.asarray, arrays_of(weights)))  # type: ignore[arg-type]
            self._steps = DecoderModel(in_numpy, step_ops)

    def make_cache(self) -> list[Any]:
        """Empty caches for one row."""
        windows = [layer.heads.window for layer in self.layers]
        return [self.ops.new_cache() if window is None else RotatingKVCache(window) for window in windows]  # type: ignore[no-untyped-call]

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, dim] of `tokens` [rows, width]."""
        rows, width = tokens.shape
        return self.ops.embed(tokens.reshape(-1), self.weights.embedding).reshape(rows, width, -1)

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
        positions: mx.array | None = None,
        shift: mx.array | None = None,
        deep: Sequence[mx.array] = (),
    ) -> mx.array:
        """Logits [rows, width, vocab] for `inputs` [rows, width]; the rest as in `Segment`."""
        rows, width = inputs.shape
        caches = self.make_cache() if cache is None else cache
        if input_embeddings is not None or positions is not None:
            flat = self._embedded(inputs, input_embeddings)
            (logits,) = self._run(flat, [_Attention(self, inputs, caches, positions, shift, deep)])
            return logits.reshape(rows, width, -1)
        # The last layer's offset: mlx-lm's caches change theirs in place when they are written.
        offset = caches[-1].offset if shift is None else caches[-1].offset + shift
        if not isinstance(offset, mx.array) or width > WIDTH_MAX:
            (logits,) = self._run(self._embedded(inputs), [_Attention(self, inputs, caches, shift=shift)])
            return logits.reshape(rows, width, -1)
        if self._steps is not None:
            return self._at_once(self._steps, [Segment(inputs, caches, shift=shift)])[0]
        attention = self.traced_attention and self.traced_attention.step(caches, width, offset)
        calls = self._traces.calls
        key = rows, width, attention.kind if attention else None
        traced = calls.pop(key, None) or self._traces.make(*key)
        # The last one is the last in use. A method for this would be one more call of Python's a step.
        calls[key] = traced
        if attention:
            hidden, *product = traced[0](inputs)
            return _replayed(traced[1:], hidden, product, attention)[0]
        masks = {}
        for window, first in self.windows:
            masks[window] = self.ops.mask(caches[first], width, window)
        hidden, *qkv = traced[0](inputs, offset)
        for heads, layer_cache, call in zip(self.heads, caches, traced[1:], strict=True):
            attended = self.ops.attend(qkv, heads, offset, layer_cache, masks[heads.window])
            hidden, *qkv = call(hidden, attended, offset)
        return hidden

    def hidden(self, inputs: mx.array, cache: list[Any] | None = None, *, lazily: bool = False) -> mx.array:
        """Hidden states [rows, width, dim] after the last norm, the inputs of the head.

        No layer is computed yet if `lazily`.
        """
        rows, width = inputs.shape
        caches = self.make_cache() if cache is None else cache
        step = _Attention(self, inputs, caches, reads=True, lazily=lazily)
        hidden, (attended,), _ = self._attended(self._embedded(inputs), [step])
        normed = _after_attention(self.ops, self.layers[-1], self.weights.norm, hidden, attended)[1]
        return normed.reshape(rows, width, -1)

    def packed(self, segments: Sequence[Segment]) -> list[mx.array]:
        """Logits [rows, width, vocab] of each segment, or hidden states of one that `reads`, lazy: unused ones are not
        computed."""
        if self._steps is not None and all(map(_is_decode, segments)):
            return self._at_once(self._steps, segments)
        steps = [
            _Attention(
                self,
                one.inputs,
                one.caches,
                one.positions,
                one.shift,
                one.deep,
                one.reads,
                lengths=one.lengths,
            )
            for one in segments
        ]
        if all(segment.embeddings is None for segment in segments):
            hidden = self._embedded(mx.concatenate([segment.inputs.reshape(-1) for segment in segments]))
        else:
            hidden = mx.concatenate([self._embedded(one.inputs, one.embeddings) for one in segments])
        logits = self._run(hidden, steps)
        return [found.reshape(step.rows, step.width, -1) for found, step in zip(logits, steps, strict=True)]

    def _at_once(self, steps: DecoderModel, segments: Sequence[Segment]) -> list[mx.array]:
        """Logits of decode steps, computed."""
        # A row that is not a number is noticed by its logits.
        with np.errstate(all="ignore"):
            return list(map(mx.array, steps.packed(segments)))

    def trace_steps(self, rows_max: int, until_s: float, width: int = 1) -> None:
        """Trace steps of this width for each number of rows up to `rows_max`, until `until_s`.

        `until_s` is on the clock of `time.perf_counter`. No array is computed.
        """
        for rows in range(1, rows_max + 1):
            if time.perf_counter() > until_s:
                return
            self._traces.trace(rows, width)

    def _embedded(self, tokens: mx.array, embeddings: mx.array | None = None) -> mx.array:
        """Hidden states [tokens, dim] before the first layer."""
        if embeddings is not None:
            return embeddings.reshape(tokens.size, -1)
        return self.ops.embed(tokens.reshape(-1), self.weights.embedding)

    def _run(self, hidden: mx.array, steps: Sequence[_Attention]) -> list[mx.array]:
        """Logits [tokens, vocab] of each of `steps`; `hidden` are the embedded tokens of all, concatenated."""
        tokens = hidden.shape[0]
        if (padding := self.ops.padded(tokens) - tokens) > 0:
            hidden = mx.pad(hidden, [(0, padding), (0, 0)])
        hidden, attended, spans = self._attended(hidden, steps)
        return self._logits(hidden, attended, steps, spans)

    def _attended(
        self, hidden: mx.array, steps: Sequence[_Attention]
    ) -> tuple[mx.array, list[mx.array], list[slice]]:
        """Hidden states before the last attention, its output for each of `steps`, and the slice of tokens of each.

        Tokens of `hidden` behind those of `steps` are padding.
        """
        ops = self.ops
        product = ops.product(ops.norm(hidden, self.layers[0].input_norm), *self.layers[0].qkv)
        ends = [sum(step.tokens for step in steps[: index + 1]) for index in range(len(steps))]
        spans = [slice(end - step.tokens, end) for end, step in zip(ends, steps, strict=True)]
        together = None
        are_several = len(steps) > 1 or bool(steps[0].lengths)
        if self._packed_attention and are_several and all(step.follows for step in steps):
            segments = [(step.caches, step.lengths or step.width) for step in steps]
            together = self._packed_attention.step(segments, hidden.shape[0])
        if together:
            hidden, every = self._attended_together(hidden, product, together)
            attended = [every[span] for span in spans]
        else:
            hidden, attended = self._attended_apart(hidden, product, steps, spans)
        return hidden[: ends[-1]] if hidden.shape[0] > ends[-1] else hidden, attended, spans

    def _attended_together(
        self, hidden: mx.array, product: mx.array, attention: StepAttention
    ) -> tuple[mx.array, mx.array]:
        """Hidden states before the last attention and its output, where all segments attend in one call."""
        assert self._packed_attention is not None
        calls = self._traces.between(hidden.shape[0], attention.kind)
        hidden, (product,) = _replayed(calls, hidden, [product], attention)
        given = product, *attention.shared, *attention.layers[-1]
        every = self._packed_attention.attend(attention.kind, self.heads[-1], *given)
        attention.wrote[-1](every)
        return hidden, every

    def _attended_apart(
        self, hidden: mx.array, product: mx.array, steps: Sequence[_Attention], spans: Sequence[slice]
    ) -> tuple[mx.array, list[mx.array]]:
        """Hidden states before the last attention and its outputs, where each segment attends for itself."""
        ops = self.ops
        has_deep = any(step.deep for step in steps)
        traced = self._traces.between(hidden.shape[0]) if ops.traces_packed and not has_deep else None
        padding = hidden.shape[0] - spans[-1].stop
        is_whole = len(steps) == 1 and not padding
        unused: list[mx.array] = []
        attended: list[mx.array] = []
        last = len(self.layers) - 1
        for number, (layer, norm) in enumerate(self._layers_and_norms()):
            attended = []
            for step, span in zip(steps, spans, strict=True):
                own = product if is_whole else product[span]
                attended.append(_by_token(step.attend(number, step.rotate(own, layer.heads))))
            if number == last:
                break
            if padding and not unused:
                unused.append(mx.zeros((padding, attended[0].shape[1]), attended[0].dtype))
            every = attended[0] if is_whole else ops.concatenate([*attended, *unused])
            if traced is not None:
                hidden, product = traced[number](hidden, every)
                continue
            hidden, normed = _after_attention(ops, layer, norm, hidden, every)
            if any(number < len(step.deep) for step in steps):
                added = mx.concatenate([step.deep_behind(number, hidden) for step in steps])
                hidden = hidden + mx.pad(added, [(0, padding), (0, 0)])
                normed = ops.norm(hidden, norm)
            product = ops.product(normed, *self.layers[number + 1].qkv)
        return hidden, attended

    def _logits(
        self,
        hidden: mx.array,
        attended: Sequence[mx.array],
        steps: Sequence[_Attention],
        spans: Sequence[slice],
    ) -> list[mx.array]:
        """Logits of each of `steps`, from the last attention on. Those of prompts are separate arrays, since they may
        be unused."""
        layer, norm, head = self.layers[-1], self.weights.norm, self.weights.head

        def logits(hidden: mx.array, attended: mx.array, reads: bool = False) -> mx.array:
            states = _after_attention(self.ops, layer, norm, hidden, attended)[1]
            return states if reads else self.ops.product(states, head)

        if len(steps) == 1:
            return [logits(hidden, attended[0], steps[0].reads)]
        # The head's weights are read once for all rows in decode.
        few = [index for index, step in enumerate(steps) if step.width <= WIDTH_MAX and not step.reads]
        found = {
            index: logits(hidden[spans[index]], attended[index], step.reads)
            for index, step in enumerate(steps)
            if index not in few
        }
        if few:
            together = logits(
                self.ops.concatenate([hidden[spans[index]] for index in few]),
                self.ops.concatenate([attended[index] for index in few]),
            )
            end = 0
            for index in few:
                start, end = end, end + steps[index].tokens
                found[index] = together[start:end]
        return [found[index] for index in range(len(steps))]

    def _layers_and_norms(self) -> Sequence[tuple[Layer, Norm]]:
        """Every layer, and the norm after it."""
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.weights.norm]
        return list(zip(self.layers, norms, strict=True))


class _Attention:
    """Attention of one segment of a step in every layer.

    `offset`: position of each row's first token, [rows], or a number for a single row. The rest is as in `Segment`.
    """

    def __init__(
        self,
        model: DecoderModel,
        inputs: mx.array,
        caches: list[Any],
        positions: mx.array | None = None,
        shift: mx.array | None = None,
        deep: Sequence[mx.array] = (),
        reads: bool = False,
        lazily: bool = False,
        lengths: Sequence[int] = (),
    ) -> None:
        self.rows, self.width = inputs.shape
        self.reads = reads
        self.lengths = lengths
        self._lazily = lazily
        self.tokens = self.rows * self.width
        self.offset: mx.array | int = caches[-1].offset if shift is None else caches[-1].offset + shift
        self.deep = deep
        self._angles: tuple[mx.array, mx.array] | None = None
        if positions is not None:
            assert model.axes is not None, "the model has three positions for a token"
            self._angles = angles(positions, model.axes, model.layers[0].heads.rotation)
        self._ops = model.ops
        self._layers = model.layers
        self.caches = caches
        self.follows = positions is None and shift is None
        """Whether positions follow from the caches."""
        if self.rows == 1:
            self._ops.make_room(model.heads, caches, self.width)
        # By window, made in the first layer that has it: such layers share a mask.
        self._masks: dict[int | None, Any] = {}

    def rotate(self, product: mx.array, heads: HeadShape) -> QKV:
        """Queries, keys and values of the segment's tokens."""
        if self._angles is None:
            return self._ops.rotate(product, heads, self.offset, self.rows)
        return rotate_by(product, heads, self._angles, self.rows)

    def deep_behind(self, number: int, hidden: mx.array) -> mx.array:
        """Numbers [tokens, dim] to add to hidden states behind a layer."""
        if number < len(self.deep):
            return self.deep[number].reshape(self.tokens, -1).astype(hidden.dtype)
        return mx.zeros((self.tokens, hidden.shape[-1]), hidden.dtype)

    def attend(self, number: int, qkv: QKV) -> mx.array:
        """Write keys and values of one layer, and attend; returns [rows, heads, width, dim]."""
        heads, cache = self._layers[number].heads, self.caches[number]
        if heads.window not in self._masks:
            if self.lengths:
                self._masks[heads.window] = _mask_of_texts(self.lengths)
            else:
                self._masks[heads.window] = self._ops.mask(cache, self.width, heads.window)
        mask = self._masks[heads.window]
        # The output of the last layer is unused where a prompt goes on.
        is_unused = number == len(self._layers) - 1 and not self.reads and self.width > WIDTH_MAX
        attend = self._ops.attend_lazily if is_unused or self._lazily else self._ops.attend
        return attend(qkv, heads, self.offset, cache, mask)


def _is_decode(segment: Segment) -> bool:
    """Whether a segment is a step of a batch, a verify block or of one token a row, and no prompt."""
    if segment.inputs.shape[1] > WIDTH_MAX or segment.reads or segment.deep:
        return False
    is_of_tokens = segment.embeddings is None and segment.positions is None
    return is_of_tokens and isinstance(segment.caches[-1].offset, mx.array)


def _mask_of_texts(lengths: Sequence[int]) -> mx.array:
    """The columns that each token sees, [tokens, tokens], of texts side by side."""
    text = np.repeat(np.arange(len(lengths)), lengths)
    return mx.array(np.tril(text[:, None] == text))


def _replayed(
    calls: Sequence[Traced], hidden: mx.array, product: Sequence[mx.array], attention: StepAttention
) -> tuple[mx.array, Sequence[mx.array]]:
    """Hidden states and the product behind as many layers as there are `calls`, from those of the first layer."""
    for call, arrays, wrote in zip(calls, attention.layers, attention.wrote, strict=False):
        hidden, *product = call(hidden, *product, *attention.shared, *arrays)
        if wrote(hidden):
            mx.async_eval(hidden, *product)  # type: ignore[no-untyped-call]
    return hidden, product


def _by_token(attended: mx.array) -> mx.array:
    """[tokens, heads * dim] of [rows, heads, width, dim]."""
    rows, _, width, _ = attended.shape
    return attended.transpose(0, 2, 1, 3).reshape(rows * width, -1)


def _after_attention(
    ops: Ops, layer: Layer, norm: Norm, hidden: mx.array, attended: mx.array
) -> tuple[mx.array, mx.array]:
    """The hidden states after a layer, and these after the next `norm`."""
    hidden, normed = ops.add_and_norm(hidden, ops.product(attended, layer.out), layer.mlp_norm)
    return ops.add_and_norm(hidden, ops.mlp(normed, layer.mlp), norm)


class _Between(NamedTuple):
    """Weights between two attentions: the end of one layer and the beginning of the next.

    The first has the `embedding` in place of a layer, the last one the `head`.
    """

    embedding: Linear | None
    layer: Layer | None
    norm: Norm
    following: Layer | None
    head: Linear | None

    def run(
        self, ops: Ops, inputs: mx.array, attended: mx.array | None, offset: mx.array | None, rows: int
    ) -> Sequence[mx.array]:
        """Hidden states, and queries, keys and values of the next layer, or its product if there is no `offset`; or the
        logits [rows, width, vocab].

        Takes hidden states, and what attention gave, [tokens, heads * dim]; or tokens.
        """
        if self.embedding is not None:
            hidden = ops.embed(inputs.reshape(-1), self.embedding)
            normed = ops.norm(hidden, self.norm)
        else:
            assert self.layer is not None
            assert attended is not None
            hidden, normed = _after_attention(ops, self.layer, self.norm, inputs, attended)
        if self.following is None:
            assert self.head is not None
            return (ops.product(normed, self.head).reshape(rows, -1, self.head.outputs),)
        following = self.following
        product = ops.product(normed, *following.qkv)
        if offset is None:
            return hidden, product
        return hidden, *ops.rotate(product, following.heads, offset, rows)


class _Traces:
    """Traced calls of a model, by the number of rows and the width of a step, and the kind of its attention."""

    def __init__(
        self,
        weights: DecoderWeights,
        ops: Ops,
        attention: TracedAttention | None,
        packed: PackedAttention | None,
    ) -> None:
        self._ops = ops
        self._attention = attention
        self._packed = packed
        layers = weights.layers
        norms = [*(layer.input_norm for layer in layers), weights.norm]
        self._parts = [
            _Between(
                None if number else weights.embedding,
                layers[number - 1] if number else None,
                norm,
                layers[number] if number < len(layers) else None,
                None if number < len(layers) else weights.head,
            )
            for number, norm in enumerate(norms)
        ]
        self._kinds: list[Hashable] = [kind_of(part) for part in self._parts]
        self._arrays = [arrays_of(part) for part in self._parts]
        self.calls: dict[tuple[int, int, Hashable], list[Traced]] = {}
        """The traced calls of a step, by rows, width and kind, the least recently used first; those of a packed step by
        0 and its tokens. The kind is None where attention is not traced.

        The first call takes tokens [rows, width] and offsets; the others hidden states, the output of attention, and
        offsets. Where attention is traced, the first takes tokens; the others hidden states, the product of the layer,
        and the arrays of its attention.
        """
        self._shapes_max = _SHAPES_MAX

    def make(self, rows: int, width: int, kind: Hashable = None) -> list[Traced]:
        """New calls for a step that has none in `calls`, where there is room for them then."""
        while len(self.calls) >= self._shapes_max:
            # MLX frees a trace with its function.
            del self.calls[next(iter(self.calls))]
        by_kind: dict[Hashable, Traced] = {}
        made: list[Traced] = []
        for part, alike, arrays in zip(self._parts, self._kinds, self._arrays, strict=True):
            if alike not in by_kind:
                by_kind[alike] = self._compiled(part, rows, kind)
            made.append(partial(by_kind[alike], arrays))
        return made

    def between(self, tokens: int, kind: Hashable = None) -> list[Traced]:
        """The calls between two layers of a packed step of `tokens`, which take hidden states and what attention gave,
        [tokens, heads * dim]; where attention is traced, the product and the arrays of the first of both instead."""
        found = self.calls.pop((0, tokens, kind), None) or self.make(0, tokens, kind)
        self.calls[0, tokens, kind] = found
        return found[1:-1]

    def trace(self, rows: int, width: int) -> None:
        """Build the calls of steps of this shape, and trace each kind of them once. They count for no bound."""
        examples = self._attention.examples(rows, width) if self._attention else []
        for attention in [*examples, None]:
            key = rows, width, attention.kind if attention else None
            if key not in self.calls:
                self._shapes_max += 1
                self.calls[key] = self.make(*key)
                self._trace(self.calls[key], rows, width, attention)

    def _trace(self, calls: Sequence[Traced], rows: int, width: int, attention: StepAttention | None) -> None:
        offset = mx.zeros((rows,), mx.int32)
        tokens = mx.zeros((rows, width), mx.uint32)
        hidden, *product = calls[0](tokens) if attention else calls[0](tokens, offset)
        done = set()
        for number, (part, alike, call) in enumerate(
            zip(self._parts[1:], self._kinds[1:], calls[1:], strict=True)
        ):
            if alike in done:
                continue
            done.add(alike)
            assert part.layer is not None
            heads = part.layer.heads
            if attention:
                call(hidden, *product, *attention.shared, *attention.layers[number])
            else:
                call(hidden, mx.zeros((rows, heads.heads, width, heads.dim), hidden.dtype), offset)

    def _compiled(self, part: _Between, rows: int, kind: Hashable) -> Traced:
        attention: TracedAttention | PackedAttention | None = self._attention if rows else self._packed

        def run(arrays: list[mx.array], inputs: mx.array, *given: mx.array) -> Sequence[mx.array]:
            own = filled(part, iter(arrays))
            attended = offset = None
            if kind is not None:
                assert attention is not None
                attended = attention.attend(kind, own.layer.heads, *given) if own.layer else None
            elif rows:
                attended, offset = _by_token(given[0]) if own.layer else None, given[-1]
            else:
                (attended,) = given
            return own.run(self._ops, inputs, attended, offset, rows)

        return mx.compile(run)
