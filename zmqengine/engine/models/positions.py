"""Three positions of a token, frame, row and column, by which Qwen's models that see turn queries and keys (M-RoPE).

A text token has one number three times, so that the rotation is the plain one; a feature has its image's place, its row
and its column. Which of the three turns a pair of numbers is a fact of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.decoder_weights import RotaryEmbedding

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
    """Cosines and sines [rows, 1, width, pairs] of positions [3, rows, width]."""
    dims = rotation.dims
    if rotation.freqs is None:
        assert rotation.base is not None, "a rotation has a base or frequencies"
        speeds = rotation.base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    else:
        speeds = 1 / rotation.freqs
    chosen = positions[mx.array(axes)].astype(mx.float32) * rotation.scale
    turned = chosen.transpose(1, 2, 0)[:, None] * speeds
    return mx.cos(turned), mx.sin(turned)
