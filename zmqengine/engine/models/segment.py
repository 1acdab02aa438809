"""A segment of a packed step: rows that attend together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx


class Segment(NamedTuple):
    """Rows that attend together: `inputs` [rows, width] are their next tokens, `caches` one for each layer.

    `embeddings` [rows, width, dim] stand in place of those of the tokens, where some tokens are features of images.
    `positions` [3, rows, width]: three positions of each token; None where they follow from the caches. `shift` [rows]:
    numbers to add to the positions that follow from the caches. `deep`: numbers [rows, width, dim] to add to the hidden
    states behind each of the first layers. A segment that `reads` is of texts: the step gives its last hidden states
    [rows, width, dim] instead of logits. `lengths`: tokens of each of several texts that are side by side in one row;
    each attends to its own tokens.
    """

    inputs: mx.array
    caches: list[Any]
    embeddings: mx.array | None = None
    positions: mx.array | None = None
    shift: mx.array | None = None
    deep: Sequence[mx.array] = ()
    reads: bool = False
    lengths: Sequence[int] = ()
