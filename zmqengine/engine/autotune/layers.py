"""A step through the layers of a model with less work for the host.

From one attention to the next a model does the same in every step. What lies between is traced once for a number of
rows and replayed in one call, where the model's own Python makes some twenty. Caches and attention stay outside: they
are of another length in every step.

The model's own code is what is traced: a layer up to its attention, and from there on. Layers that differ in nothing
but their arrays have their traces in common: to trace one takes a millisecond, and a batch that drafts, whose number of
tokens is often new, would have to wait for it in every layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache as once
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from zmqengine.engine import kv
from zmqengine.engine.autotune import attention
from zmqengine.engine.autotune.attending import KeyValues, attending, until_it_attends
from zmqengine.engine.autotune.fused import Fused, agrees, fused
from zmqengine.engine.autotune.likeness import Slots, filled, taken_apart
from zmqengine.engine.autotune.plain import turn_back, turn_weights
from zmqengine.engine.cuda.between_products import Heads
from zmqengine.engine.models.mlx_lm import KVCache

WIDTH_MAX = 8
"""More tokens of a row at once are a prompt: those have too many lengths to trace."""

# Numbers of rows and widths that are traced. Traces are kept for good, some 200 KiB for each.
_SHAPES_MAX = 512


Kind = tuple[int, mx.Dtype]
Traced = Callable[..., Sequence[mx.array]]


class _Traces:
    """What is traced of a `layer`, and of all others that are like it: they give their own arrays, in the same order as
    its own stand in `slots`. Where they can be, they are `fused`."""

    def __init__(self, layer: Module, slots: Slots, fused: Fused | None) -> None:
        self._layer = layer
        self._slots = slots
        self._fused = fused
        self._call: Callable[..., mx.array] = type(layer).__call__
        self.modules = attention.attending_modules(layer)
        # By the shape of their inputs: what MLX compiles looks for the right one of its own traces one by one.
        self._firsts: dict[tuple[int, ...], Traced] = {}
        self._seconds: dict[tuple[tuple[int, ...], _Traces | None], Traced] = {}
        self.scale = 0.0 if fused is None else fused.scale
        # The width and type of inputs, once a layer was traced.
        self.kind: Kind | None = None

    @property
    def is_fused(self) -> bool:
        """Whether these are traces of fused layers."""
        return self._fused is not None

    def first(self, shape: tuple[int, ...]) -> Traced:
        """For inputs of this shape: queries, keys and values of such a layer, or the product that has all of them, from
        its arrays, what comes into it, and where rows stand."""
        if shape not in self._firsts:
            self._firsts[shape] = mx.compile(self._first)
        return self._firsts[shape]

    def second(self, shape: tuple[int, ...], following: _Traces | None) -> Traced:
        """What it makes of that and of what it has attended to, and then the same as `first` of the layer that is
        `following`, if any is. From the arrays of both, what came into it, what it has attended to, and where rows
        stand."""
        key = shape, following
        if key not in self._seconds:
            self._seconds[key] = mx.compile(partial(self._second, following))
        return self._seconds[key]

    def _first(self, arrays: list[mx.array], inputs: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
        _, *found = self._enter(arrays, inputs, None, offset)
        return tuple(found)

    def _enter(
        self, arrays: list[mx.array], inputs: mx.array, added: mx.array | None, offset: mx.array
    ) -> tuple[mx.array, ...]:
        """What comes into the layer, with what of the one before is yet to be `added`; and what it attends with."""
        self.kind = inputs.shape[2], inputs.dtype
        with filled(self._slots, arrays):
            if self._fused is not None:
                return self._fused.begin(inputs, added)
            found = until_it_attends(self._run, self.modules, inputs, offset)
            self.scale = found.scale
            return inputs, found.queries, found.keys, found.values

    def _second(
        self,
        following: _Traces | None,
        arrays: list[mx.array],
        arrays_following: list[mx.array],
        inputs: mx.array,
        attended: mx.array,
        offset: mx.array,
    ) -> tuple[mx.array, ...]:
        added = None
        with filled(self._slots, arrays):
            if self._fused is None:
                output = self._from_attention_on(inputs, attended, offset)
            elif following is None or following._fused is None:
                output = self._fused.end(inputs, attended)
            else:
                output, added = self._fused.rest(inputs, attended)
        return (output,) if following is None else following._enter(arrays_following, output, added, offset)

    def _from_attention_on(self, inputs: mx.array, attended: mx.array, offset: mx.array) -> mx.array:
        # What the layer makes before its attention is not used here, and so no part of the trace.
        with attending(self.modules, lambda *given, **options: attended):
            output: mx.array = self._run(inputs, None, KeyValues(offset))
            return output

    def _run(self, inputs: mx.array, mask: None, cache: KeyValues) -> Any:
        return self._call(self._layer, inputs, mask, cache=cache)


class _Halves:
    """One layer in two halves. With its second one comes the first one of the layer that is `following`, if any is.

    Of one that is fused, `heads` are its own.
    """

    def __init__(
        self,
        traces: _Traces,
        arrays: list[mx.array],
        heads: Heads | None,
        following: _Halves | None,
        shapes: set[tuple[int, int]],
    ) -> None:
        self.traces = traces
        self._arrays = arrays
        self._heads = heads
        self.following = following
        self._shapes = shapes
        # What the layer before has made of the coming step, and from what.
        self._ready: Sequence[mx.array] = ()
        self._ready_from: tuple[mx.array | None, mx.array | None] = (None, None)

    @property
    def is_full(self) -> bool:
        """Whether no more shapes are traced."""
        return len(self._shapes) >= _SHAPES_MAX

    def knows(self, inputs: mx.array, cache: Any) -> bool:
        """Whether this step goes this way."""
        if type(cache) is not kv.RaggedKVCache or cache.keys is None:
            return False
        shape = inputs.shape[0], inputs.shape[1]
        if shape in self._shapes:
            return True
        if shape[1] > WIDTH_MAX or self.is_full:
            return False
        self._shapes.add(shape)
        return True

    def run(self, inputs: mx.array, mask: Any, cache: Any) -> mx.array:
        """The output of the layer, for a step that it `knows`."""
        offset, traces = cache.offset, self.traces
        made_of, at = self._ready_from
        is_ready = made_of is inputs and at is offset
        entered = self._ready if is_ready else self._first(inputs, offset)
        self._ready, self._ready_from = (), (None, None)
        attend = getattr(traces.modules[0], attention.NAME)
        if self._heads is None:
            queries, keys, values = entered
            attended = attention.attend_cached(attend, queries, keys, values, cache, traces.scale, mask)
        else:
            (product,) = entered
            attended = attention.attend_turned(
                attend, product, self._heads, inputs.shape[1], cache, traces.scale, mask
            )
        output, *ready = self._second(inputs, attended, offset)
        if self.following is not None:
            self.following._ready, self.following._ready_from = ready, (output, offset)
        return output

    def trace(self, inputs: mx.array, offset: mx.array) -> None:
        """Be ready for steps of this shape. Nothing is computed."""
        attended, *_ = self._first(inputs, offset)
        if self._heads is not None:
            shape, *_ = self._heads.shapes(inputs.shape[0], inputs.shape[1])
            attended = mx.zeros(shape, inputs.dtype)
        self._second(inputs, attended, offset)
        self._shapes.add((inputs.shape[0], inputs.shape[1]))

    def _first(self, inputs: mx.array, offset: mx.array) -> Sequence[mx.array]:
        return self.traces.first(inputs.shape)(self._arrays, inputs, offset)

    def _second(self, inputs: mx.array, attended: mx.array, offset: mx.array) -> Sequence[mx.array]:
        following = self.following
        traces, arrays = (None, []) if following is None else (following.traces, following._arrays)
        return self.traces.second(inputs.shape, traces)(self._arrays, arrays, inputs, attended, offset)


def install(model: Any, *, fuses: bool = False) -> int:
    """Have the layers of `model` go this way; returns how many can. Those that cannot show it by raising in a step.

    On CUDA one `fuses` those that it can.
    """
    layers = getattr(model, "layers", None)
    caches = kv.new_caches(model)
    if not isinstance(layers, list) or len(layers) != len(caches):
        return 0
    shapes: set[tuple[int, int]] = set()
    known: dict[object, _Traces] = {}
    following: _Halves | None = None
    count = 0
    turn_weights(model)
    for layer, cache in reversed(list(zip(layers, caches, strict=True))):
        if type(cache) is not KVCache or not attention.attending_modules(layer):
            following = None
            continue
        likeness, slots = taken_apart(layer)
        as_fused = fused(layer) if fuses else None
        if likeness not in known:
            is_right = as_fused is not None and agrees(as_fused, layer)
            known[likeness] = _Traces(layer, slots, as_fused if is_right else None)
        traces, arrays = known[likeness], [held[name] for held, name in slots]
        heads = as_fused.heads if as_fused is not None and traces.is_fused else None
        following = _Halves(traces, arrays, heads, following, shapes)
        kind: Any = type(layer)
        layer.__class__ = _split(kind)
        layer._halves = following
        count += 1
    return count


def count_fused(model: Any) -> int:
    """How many of the layers that go this way are fused."""
    return sum(one.traces.is_fused for one in _all_halves(model))


def uninstall(model: Any) -> None:
    """Undo `install`."""
    turn_back(model)
    for layer in getattr(model, "layers", ()):
        if hasattr(layer, "_halves"):
            layer.__class__ = type(layer).__mro__[1]
            del layer._halves


def trace(model: Any, rows_max: int, until_s: float, width: int = 1) -> None:
    """Be ready for steps of this width and every number of rows up to `rows_max`, as far as there is time and room."""
    # One of those that have their traces in common.
    some = {(one.traces, one.following and one.following.traces): one for one in _all_halves(model)}.values()
    for rows in range(1, rows_max + 1):
        if time.perf_counter() > until_s or any(one.traces.kind is None or one.is_full for one in some):
            return
        offset = mx.zeros((rows,), mx.int32)
        for one in some:
            dim, dtype = cast(Kind, one.traces.kind)
            one.trace(mx.zeros((rows, width, dim), dtype), offset)


def _all_halves(model: Any) -> list[_Halves]:
    return [layer._halves for layer in getattr(model, "layers", ()) if hasattr(layer, "_halves")]


@once
def _split(kind: Any) -> Any:
    """The same kind of layer, in halves."""

    def call(self: Any, inputs: mx.array, mask: Any = None, cache: Any = None, **others: Any) -> Any:
        halves: _Halves = self._halves
        if others or not halves.knows(inputs, cache):
            return kind.__call__(self, inputs, mask, cache=cache, **others)
        return halves.run(inputs, mask, cache)

    # Under the same names: others look for a layer's module by them.
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
