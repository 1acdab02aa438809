"""The packed step: rows in decode and chunks of prompts go through the model together, as one list of tokens.

Norms and products of a layer take every token alike, whichever row it belongs to, so they read the weights once for all
of them. Only attention tells rows apart: each segment attends with its own caches. A model that cannot be packed gets a
call for each segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.models.trunk import trunk_of


def forward(model: Any, segments: Sequence[Segment]) -> list[mx.array]:
    """The logits [rows, width, vocab] of each segment, or hidden states of one that `reads`, not computed yet."""
    if (len(segments) > 1 or (segments and segments[0].lengths)) and hasattr(model, "packed"):
        logits: list[mx.array] = model.packed(segments)
        return logits
    # A loop is no call, as a comprehension is before Python 3.12.
    found = []
    for segment in segments:
        found.append(_alone(model, segment))
    return found


def read_lazily(model: Any, segment: Segment) -> mx.array:
    """The last hidden states [rows, width, dim] of a segment, of which no layer is computed yet."""
    if isinstance(model, DecoderModel):
        return model.hidden(segment.inputs, segment.caches, lazily=True)
    states: mx.array = _alone(model, segment)
    return states


def _alone(model: Any, segment: Segment) -> Any:
    if segment.reads:
        return trunk_of(model)(segment.inputs, cache=segment.caches)
    if (
        segment.embeddings is None
        and segment.positions is None
        and segment.shift is None
        and not segment.deep
    ):
        return model(segment.inputs, cache=segment.caches)
    return _with_images(model, segment)


def _with_images(model: Any, segment: Segment) -> Any:
    given: dict[str, Any] = {
        "input_embeddings": segment.embeddings,
        "positions": segment.positions,
        "shift": segment.shift,
        "deep": segment.deep or None,
    }
    known = {name: value for name, value in given.items() if value is not None}
    return model(segment.inputs, cache=segment.caches, **known)
