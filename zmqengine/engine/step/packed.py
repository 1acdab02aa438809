"""The packed step: rows in decode and chunks of prompts go through the model together, as one list of tokens.

Norms and products of a layer take every token alike, whichever row it belongs to, so they read the weights once for all
of them. Only attention tells rows apart: each segment attends with its own caches. A model that cannot be packed gets a
call for each segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.trunk import trunk_of
from zmqengine.engine.row import Caches


class Segment(NamedTuple):
    """Rows that attend together: `inputs` [rows, width] are their next tokens, `caches` one for each layer.

    `embeddings` [rows, width, dim] stand in place of those of the tokens, where some tokens are features of images.
    A segment that `reads` is of texts: the step gives its last hidden states [rows, width, dim] instead of logits.
    `positions`, `shift` and `deep` are as in `models.decoder.StepSegment`, for models that have such.
    """

    inputs: mx.array
    caches: Caches
    embeddings: mx.array | None = None
    positions: mx.array | None = None
    shift: mx.array | None = None
    deep: Sequence[mx.array] = ()
    reads: bool = False


def forward(model: Any, segments: Sequence[Segment]) -> list[mx.array]:
    """The logits [rows, width, vocab] of each segment, or hidden states of one that `reads`, not computed yet."""
    if len(segments) > 1 and hasattr(model, "packed"):
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
