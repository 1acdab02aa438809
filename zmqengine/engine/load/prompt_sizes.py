"""The few sizes in which prompts are read where each new one costs.

A GPU library takes other kernels for another number of tokens, and CUDA makes its graphs anew for them: 100 ms and more
for a prompt of a length that was not seen, of which 6 ms is computing. So a text is read with tokens behind it that
mean nothing. What comes later is not seen by what was before; and caches are set back to where the text ends.
"""

from __future__ import annotations

from collections.abc import Iterator

WHOLE = 256
"""Larger sizes are multiples of it: from such a place on, no more is allocated than a cache grows by anyway."""

_SMALL = (16, 32, 64, 128)
_LARGEST = 2048
SIZES = (*_SMALL, *range(WHOLE, _LARGEST + 1, WHOLE))
"""Numbers of tokens that are usual in a call of the model."""

# Places where a prompt may go on that was found in part: before each of the numbers of columns that attention takes.
_UNEVEN = (40, 180, 350)
_BACK = 500


def at_least(tokens: int) -> int:
    """The smallest size that holds so many tokens."""
    return next((size for size in SIZES if size >= tokens), -(-tokens // WHOLE) * WHOLE)


def at_most(tokens: int) -> int:
    """The largest size within so many tokens; the number itself below all sizes."""
    if tokens > _LARGEST:
        return tokens // _LARGEST * _LARGEST
    return max((size for size in SIZES if size <= tokens), default=tokens)


class Sizes:
    """The sizes in which prompts are read that come to hold at most `tokens_max`; with 0 any size is one."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max

    def whole(self, held: int, tokens: int) -> int:
        """How many are read for `tokens` after `held` others, those without a meaning included."""
        return max(tokens, min(at_least(tokens), self.tokens_max - held)) if tokens else 0

    def part(self, held: int, tokens: int, most: int) -> int:
        """How many of `tokens` after `held` others to read within `most`, so that what is left begins as others do.

        From `WHOLE` on a part is twice, four or eight times as long, and begins at a multiple of itself: who has read
        one long prompt has met the parts of all, at whatever pace they are read.
        """
        if not self.tokens_max:
            return min(tokens, most)
        if most < WHOLE:
            return tokens if tokens <= most else at_most(most)
        size = min(_LARGEST, 1 << (most.bit_length() - 1))
        if uneven := held % WHOLE:
            return min(tokens, size - uneven)
        while held % size:
            size //= 2
        return min(tokens, size)


def usual_shapes(tokens_max: int) -> Iterator[tuple[int, int]]:
    """(tokens, columns before them) of the calls that prompts of up to `tokens_max` are read in, most usual first.

    A prompt is read in chunks of some size up to the largest, and then what is left of it. What was found in the
    prompt cache ends anywhere: for what comes behind it, columns are as good as the next larger ones.
    """
    seen: set[tuple[int, int]] = set()
    for shape in _by_use(tokens_max):
        if shape not in seen and sum(shape) <= tokens_max:
            seen.add(shape)
            yield shape


def _by_use(tokens_max: int) -> Iterator[tuple[int, int]]:
    yield from ((tokens, 0) for tokens in SIZES)
    yield from ((_LARGEST, before) for before in range(_LARGEST, tokens_max, _LARGEST))
    for before in range(_LARGEST // 2, tokens_max, _LARGEST // 2):
        yield from ((tokens, before) for tokens in SIZES if tokens <= _LARGEST // 2)
    yield from ((2 * WHOLE, before) for before in range(2 * WHOLE, tokens_max, 4 * WHOLE))
    for before in (*_UNEVEN, *range(_LARGEST // 2 - _BACK, tokens_max, _LARGEST // 2)):
        yield from ((tokens, before) for tokens in (*_SMALL, WHOLE, 2 * WHOLE, _LARGEST // 2))
    for before in range(_LARGEST, tokens_max, _LARGEST):
        yield from ((tokens, before) for tokens in SIZES)
    for before in range(WHOLE, tokens_max, WHOLE):
        yield from ((tokens, before) for tokens in SIZES if WHOLE <= tokens <= _LARGEST // 2)
