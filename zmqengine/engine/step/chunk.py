"""The prompts of a step: which of them, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

# A shorter slice of a prompt is not worth a piece of its own.
_SLICE_TOKENS_MIN = 16


def share_out(remaining: Sequence[int], tokens_max: int) -> list[int]:
    """Tokens of each prompt in a step of at most `tokens_max`; `remaining` in order of arrival.

    Short prompts go first, so a long one never holds them up. The oldest gets at least a quarter of the step, so short
    ones never starve it. A step is never empty while tokens remain.
    """
    shares = [0] * len(remaining)
    if not any(remaining):
        return shares
    oldest = next(index for index, count in enumerate(remaining) if count)
    shares[oldest] = min(remaining[oldest], max(1, tokens_max // 4))
    left = tokens_max - shares[oldest]
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        wanted = remaining[index] - shares[index]
        if wanted <= left:
            shares[index] += wanted
            left -= wanted
            continue
        # A prompt that fits into one step waits for one, unless it is the oldest.
        is_long = left >= _SLICE_TOKENS_MIN and remaining[index] > tokens_max
        if index == oldest or (is_long and shares[oldest] == remaining[oldest]):
            shares[index] += left
        else:
            # What no other prompt takes is the oldest one's.
            shares[oldest] += min(left, remaining[oldest] - shares[oldest])
        break
    return shares
