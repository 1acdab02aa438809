"""Three positions of a token, frame, row and column, by which Qwen's models that see turn queries and keys (M-RoPE).

A text token has one number three times, so that the rotation is the plain one; a feature has its image's place, its row
and its column. Which of the three turns a pair of numbers is a fact of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from zmqengine.engine.models.layers import RotaryEmbedding, Unsupported
from zmqengine.engine.models.ops import turned

Axes = tuple[int, ...]
"""The position, 0 to 2, that turns each pair of numbers."""


def axes_of(text: dict[str, Any], *, is_interleaved: bool) -> Axes | None:
    """Axes by the config of a text model: in three runs (Qwen2.5-VL), or in turns as long as each lasts (Qwen3-VL)."""
    told = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections: Sequence[int] = told.get("mrope_section") or ()
    if len(sections) != 3:
        return None
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(
        axis if (axis := pair % 3) and pair < 3 * sections[axis] else 0 for pair in range(sum(sections))
    )


def angles(positions: mx.array, axes: Axes, rotation: RotaryEmbedding) -> tuple[mx.array, mx.array]:
    """Cosines and sines [..., 1, pairs] of positions [3, ...]."""
    dims = rotation.dims
    if rotation.freqs is None:
        assert rotation.base is not None, "a rotation has a base or frequencies"
        speeds = rotation.base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    else:
        speeds = 1 / rotation.freqs
    chosen = positions[mx.array(axes)].astype(mx.float32) * rotation.scale
    turned = mx.moveaxis(chosen, 0, -1)[..., None, :] * speeds
    return mx.cos(turned), mx.sin(turned)


class CallPositions:
    """Positions of the tokens of one call, for a model that mlx-lm runs: its rotary embeddings read them here.

    They are facts of the rows, so they are set for one call alone, in which the whole graph is built.
    """

    def __init__(self, layers: Sequence[Any], axes: Axes) -> None:
        """Replace the rotary embeddings of `layers`. Raises `Unsupported` for one that is no plain rotation."""
        ropes = [layer.self_attn.rope for layer in layers if "self_attn" in layer]
        if not ropes or any(type(rope) is not RoPE or rope.traditional for rope in ropes):
            raise Unsupported("its rotary embeddings are not plain")
        first = ropes[0]
        if any((rope.dims, rope.base, rope.scale) != (first.dims, first.base, first.scale) for rope in ropes):
            raise Unsupported("its rotary embeddings differ")
        if 2 * len(axes) != first.dims:
            raise Unsupported(f"it turns {first.dims} dimensions by {len(axes)} axes")
        self._rotation = RotaryEmbedding(first.dims, False, first.base, first.scale, None, 1.0)
        self._axes = axes
        self._angles: tuple[mx.array, mx.array] | None = None
        self._shift: mx.array | None = None
        for layer in layers:
            if "self_attn" in layer:
                layer.self_attn.rope = self._rotating(layer.self_attn.rope)

    @contextmanager
    def within(self, positions: mx.array | None, shift: mx.array | None) -> Iterator[None]:
        """The positions [3, rows, tokens] of a call, and how far its rows' are ahead of their tokens, [rows]."""
        self._angles = None
        if positions is not None:
            cosines, sines = angles(positions, self._axes, self._rotation)
            # Heads come before tokens here.
            self._angles = cosines.swapaxes(1, 2), sines.swapaxes(1, 2)
        self._shift = shift
        try:
            yield
        finally:
            self._angles = self._shift = None

    def _rotating(self, plain: Any) -> Any:
        def rotate(states: mx.array, offset: mx.array | int = 0) -> mx.array:
            if self._angles is not None:
                return turned(states, self._angles)
            made: mx.array = plain(states, offset=offset if self._shift is None else offset + self._shift)
            return made

        return rotate
