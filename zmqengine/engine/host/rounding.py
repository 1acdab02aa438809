"""Comparison of logits up to rounding."""

from __future__ import annotations

import numpy as np

# Relative to the spread of logits. Differences of a random model of 36 layers in bfloat16 had a spread of 4 %, and the
# largest of six million was 24 %; those to logits of another text have a spread of 140 %.
_TYPICAL, _LARGEST = 0.1, 0.5
# Relative to the largest logit, two units of bfloat16: rounding of a logit far above all others exceeds their spread.
_OF_LARGEST = 2.0**-6


def differ_by_rounding(one: np.ndarray, other: np.ndarray, share: float = 1.0) -> bool:
    """Whether logits [rows, vocab] differ by rounding only, as from other kernels, in this share of the rows.

    NaN differs from everything.
    """
    spread, least = one.std(), _OF_LARGEST * np.abs(one).max()
    difference = one - other
    of_rows = np.sqrt(np.square(difference, dtype=np.float64).mean(axis=-1))
    are_typical = of_rows <= max(_TYPICAL * spread, least)
    are_near = np.abs(difference).max(axis=-1) <= max(_LARGEST * spread, least)
    return bool((are_typical & are_near).mean() >= share and not np.isnan(difference).any())
