"""Tells another rounding from another result."""

from __future__ import annotations

import numpy as np

# Of the spread of a row's logits: rounding is far below, another text far above.
_OF_SPREAD = 0.2
# Of the largest one, two units of bfloat16: a logit far above all others is rounded by more than they spread.
_OF_LARGEST = 2.0**-6


def differ_by_rounding(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether logits of the same shape are those of the same text, computed by other kernels. What is not a number
    differs from everything."""
    most = max(_OF_SPREAD * one.std(), _OF_LARGEST * np.abs(one).max())
    return bool(np.abs(one - other).max() <= most)
