"""Comparison of logits up to rounding."""

from __future__ import annotations

import numpy as np

# Relative to the spread of a row's logits: rounding is far below, logits of another text far above.
_OF_SPREAD = 0.2
# Relative to the largest logit, two units of bfloat16: rounding of a logit far above all others exceeds their spread.
_OF_LARGEST = 2.0**-6


def differ_by_rounding(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether logits of equal shape differ by rounding only, as from other kernels. NaN differs from everything."""
    most = max(_OF_SPREAD * one.std(), _OF_LARGEST * np.abs(one).max())
    return bool(np.abs(one - other).max() <= most)
