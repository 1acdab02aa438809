"""Attention and recurrence of a model's layers, over the slots of the rows of a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.kv.slots import ArrayShape, KVShape
from zmqengine.engine.models.architecture import Mixer
from zmqengine.engine.models.attention import PlacedPiece
from zmqengine.engine.models.layers import HeadShape, RotaryEmbedding
from zmqengine.engine.models.ops import Ops


class MixingLayout(NamedTuple):
    """A step, as attention and recurrence lay it out; None for what the model does not have."""

    attention: Any
    recurrence: Any = None


class Mixing:
    """All mixers of a model on the operations of one back-end.

    `sources`: for each layer the one whose keys and values it reads; empty where each reads its own. `shapes`: keys
    and values of a slot; `states`: its recurrent states.
    """

    def __init__(self, ops: Ops, mixers: Sequence[Mixer], sources: Sequence[int]) -> None:
        self._mixers = mixers
        heads = [number for number, mixer in enumerate(mixers) if isinstance(mixer, HeadShape)]
        recurrent = [number for number, mixer in enumerate(mixers) if not isinstance(mixer, HeadShape)]
        # Each layer's number among those of its kind.
        self._numbers = {layer: number for kind in (heads, recurrent) for number, layer in enumerate(kind)}
        owners = sorted({sources[number] if sources else number for number in heads})
        shapes: list[HeadShape] = [mixers[number] for number in heads]  # type: ignore[misc]
        self.shapes = [
            KVShape(each.key_heads, each.dim, each.dtype, has_values=each.value_dims is None)
            for number, each in zip(heads, shapes, strict=True)
            if number in owners
        ]
        caches = [owners.index(sources[number] if sources else number) for number in heads]
        self.caches = dict(zip(heads, caches, strict=True))
        """Number of the keys and values in a slot that each layer with attention reads."""
        self._attention: Any = ops.attention(shapes, caches)
        self._recurrence: Any = None
        self.states: list[tuple[ArrayShape, ...]] = []
        if recurrent:
            others: list[Any] = [mixers[number] for number in recurrent]
            self._recurrence = ops.recurrence(others)
            self.states = [each.state_shapes for each in others]
        self._is_replayed = self._attention.is_replayed and (
            self._recurrence is None or self._recurrence.is_replayed
        )

    @property
    def reads_packed(self) -> bool:
        """Whether attention reads keys and values in 8 bits."""
        return bool(self._attention.reads_packed)

    @property
    def rotation(self) -> RotaryEmbedding:
        """The rotation of queries and keys, for models that have one for all layers."""
        rotations = (mixer.rotation for mixer in self._mixers if isinstance(mixer, HeadShape))
        rotation = next(rotations)
        assert rotation is not None, "a model with positions rotates by them"
        return rotation

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> MixingLayout:
        """The layout of a step of these pieces, ordered by pool, padded to `tokens`; for the other methods."""
        recurrence = None if self._recurrence is None else self._recurrence.begin(pieces, tokens)
        return MixingLayout(self._attention.begin(pieces, tokens), recurrence)

    def mix(self, layout: MixingLayout, layer: int, inputs: Sequence[Any]) -> Any:
        """Outputs [tokens, numbers] of a layer's mixer, whose part of the slots is written."""
        number = self._numbers[layer]
        if isinstance(self._mixers[layer], HeadShape):
            return self._attention.attend(layout.attention, number, inputs)
        return self._recurrence.advance(layout.recurrence, number, *inputs)

    # --- traces ---

    def kind(self, layout: MixingLayout | None) -> Hashable:
        """The constants of a trace that contains the mixing; None where it does not."""
        if layout is None or not self._is_replayed:
            return None
        recurrence = None if self._recurrence is None else layout.recurrence.kind
        return layout.attention.kind, recurrence

    def behind(self, layout: MixingLayout, layer: int, inputs: Sequence[Any]) -> list[Any]:
        """Arguments of `mix_replayed` in a trace: the outputs, or the inputs of the mixing and arrays of slots."""
        if not self._is_replayed:
            return [self.mix(layout, layer, inputs)]
        of, number = self._of(layout, layer), self._numbers[layer]
        if of is layout.recurrence:
            of.hold(*inputs)
        return [*inputs, *of.shared, *of.layers[number]]

    def mix_replayed(self, kind: Any, mixer: Mixer, behind: Sequence[Any]) -> Any:
        """Outputs of a mixer, as a function of arrays alone."""
        if not self._is_replayed:
            return behind[0]
        attention, recurrence = kind
        if isinstance(mixer, HeadShape):
            return self._attention.attend_replayed(attention, mixer, *behind)
        return self._recurrence.advance_replayed(recurrence, mixer, *behind)

    def examples(self, tokens: int) -> Sequence[MixingLayout | None]:
        """Steps of as many rows in decode of every kind, to trace them before there is one."""
        if not self._is_replayed:
            return [None]
        recurrence = None if self._recurrence is None else self._recurrence.example(tokens)
        return [MixingLayout(attention, recurrence) for attention in self._attention.examples(tokens)]

    def example_behind(
        self, layout: MixingLayout | None, layer: int, inputs: Sequence[Any], tokens: int
    ) -> list[Any]:
        """`behind` of an example."""
        if layout is not None:
            return self.behind(layout, layer, inputs)
        mixer = self._mixers[layer]
        return [mx.zeros((tokens, mixer.outputs), mixer.dtype)]

    def _of(self, layout: MixingLayout, layer: int) -> Any:
        return layout.attention if isinstance(self._mixers[layer], HeadShape) else layout.recurrence
