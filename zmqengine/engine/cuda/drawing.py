"""Choosing tokens on CUDA with one kernel, where the host would start some twenty and make an array in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import WORDS, resident

_THREADS = 1024
_TOLD_EACH = 2
_TOLD_MIN = 16
_NOT_FINITE = 1 << 31


class Drawn(NamedTuple):
    """How one row chooses: `key` and `place` say which random number comes next, `inverse` is 1 / temperature, 0 for
    the likeliest token. Of the likeliest `top_k` are left, of those the fewest with `top_p` of the weight, and of those
    the ones whose scaled logit is not further below the best than `floor`."""

    key: int
    place: int
    inverse: float
    top_k: int
    top_p: float
    floor: float


class Chosen(NamedTuple):
    """Tokens [rows] on the device, and the small arrays from which the host reads them: see `read`."""

    tokens: mx.array
    told: tuple[mx.array, ...]


def columns(rows: Sequence[Drawn]) -> mx.array:
    """What the kernel is to know of these rows, where it need not be fetched from the host's memory."""
    found = np.zeros((len(rows), _COLUMNS), np.uint32)
    for place, row in enumerate(rows):
        found[place, :3] = row.key & 0xFFFFFFFF, row.key >> 32, row.place
        found[place, 4] = row.top_k
    floats = found.view(np.float32)
    floats[:, 3] = [row.inverse for row in rows]
    floats[:, 5] = [row.top_p for row in rows]
    floats[:, 6] = [row.floor for row in rows]
    return resident(mx.array(found.view(np.int32).reshape(-1)))


_COLUMNS = 7


def choose(logits: mx.array, plan: mx.array, drawn: int, width: int = 1) -> Chosen:
    """A token for each of `logits` [rows * width, vocab], `width` consecutive ones for each row of a plan.

    `plan` comes from `columns`; `drawn` is how many tokens every row has drawn since it was made.
    """
    count = logits.shape[0]
    pairs = max(_TOLD_MIN, 1 << (-(-count // _TOLD_EACH) - 1).bit_length())
    tokens, *told = _kernel(pairs)(
        inputs=[logits, plan, mx.array([drawn, width])],
        template=[("T", logits.dtype), ("COLUMNS", _COLUMNS)],
        grid=(count * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(max(WORDS, count),)] + [(_TOLD_EACH,)] * pairs,
        output_dtypes=[mx.uint32] * (1 + pairs),
    )
    return Chosen(tokens[:count], tuple(told[: -(-count // _TOLD_EACH)]))


def read(told: Sequence[mx.array], count: int) -> tuple[list[int], list[float]]:
    """The tokens, and for each 0, or what is not a number if its logit is not one. Waits for them."""
    numbers: list[Any] = []
    for pair in told:
        numbers += pair.tolist()  # type: ignore[arg-type]
    return (
        [number & ~_NOT_FINITE for number in numbers[:count]],
        [math.nan if number & _NOT_FINITE else 0.0 for number in numbers[:count]],
    )


@cache
def _kernel(pairs: int) -> Any:
    # Arrays of 8 bytes are in memory that the device sees where it is, so that no page moves when the host looks at
    # them (mlx/backend/cuda/allocator.cpp, SmallSizePool).
    names = [f"told_{place}" for place in range(pairs)]
    tell = (
        "  auto tell = [&](int at, unsigned int number) {\n"
        f"    unsigned int* const pairs[] = {{{', '.join(names)}}};\n"
        f"    pairs[at / {_TOLD_EACH}][at % {_TOLD_EACH}] = number;\n"
        "  };\n"
    )
    return mx.fast.cuda_kernel(
        name=f"draw_tokens_{pairs}",
        input_names=["logits", "columns", "place"],
        output_names=["tokens", *names],
        source=tell + kernel_text("draw.cu"),
    )
