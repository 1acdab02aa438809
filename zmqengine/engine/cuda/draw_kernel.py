"""The draw of tokens on CUDA in one kernel, in place of some twenty MLX operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.kernel import Kernel, Template, Variant, provide_later
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import WORDS, resident
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import inverse_temperature, top_k_of

_THREADS = 1024
_PAIR = 2
# Pairs of tokens that a kernel writes: for 32 tokens, and up to 64 rows with verify blocks of 8.
_PAIR_COUNTS = (16, 32, 64, 128, 256)
_NOT_FINITE = 1 << 31


class Drawn(NamedTuple):
    """The sampling parameters of one row.

    `key` and `output_index` determine its next random number; `inverse` is 1 / temperature, 0 for a greedy row.
    Filters: the likeliest `top_k` tokens, of those the fewest with `top_p` of the weight, and of those the ones whose
    scaled logit is at most `floor` below the best.
    """

    key: int
    output_index: int
    inverse: float
    top_k: int
    top_p: float
    floor: float


class KernelDraw:
    """The draw of all rows of a batch by one kernel; see `sampling.draw.Draw`."""

    def plan(self, rows: Sequence[Row], vocab_size: int) -> KernelPlan:
        """See `Draw.plan`."""
        return KernelPlan(rows, vocab_size)


class KernelPlan:
    """The draw for one set of rows, greedy ones too; see `sampling.draw.DrawPlan`."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        self._rows = list(rows)
        self._vocab_size = vocab_size
        self._first: list[int] = []
        self._columns: mx.array | None = None

    def draw(self, logits: mx.array, width: int = 1, ahead: int = 0) -> tuple[mx.array, tuple[mx.array, ...]]:
        """See `DrawPlan.draw`."""
        counts = {row.sampled - first for row, first in zip(self._rows, self._first, strict=False)}
        if self._columns is None or len(counts) != 1:
            # Rows gained unequal numbers of tokens since the columns were built, and the kernel adds one number to all.
            self._first = [row.sampled for row in self._rows]
            self._columns = columns([self._drawn(row) for row in self._rows])
            counts = {0}
        found = choose(logits, self._columns, counts.pop() + ahead, width)
        return found.tokens, found.pairs

    def read(self, arrays: Sequence[mx.array], count: int) -> tuple[list[int], list[float]]:
        """See `DrawPlan.read`."""
        return read(arrays, count)

    def _drawn(self, row: Row) -> Drawn:
        setting = row.sampling
        return Drawn(
            row.key,
            row.sampled,
            inverse_temperature(setting),
            top_k_of(setting, self._vocab_size),
            setting.top_p,
            math.log(setting.min_p) if setting.min_p > 0 else -math.inf,
        )


class TokenArrays(NamedTuple):
    """Tokens [rows] on the device, and in `pairs` the small arrays from which `read` gets them on the host."""

    tokens: mx.array
    pairs: tuple[mx.array, ...]


def columns(rows: Sequence[Drawn]) -> mx.array:
    """The parameters of these rows as the kernel reads them, in device memory."""
    found = np.zeros((len(rows), _COLUMNS), np.uint32)
    for index, row in enumerate(rows):
        found[index, :3] = row.key & 0xFFFFFFFF, row.key >> 32, row.output_index
        found[index, 4] = row.top_k
    floats = found.view(np.float32)
    floats[:, 3] = [row.inverse for row in rows]
    floats[:, 5] = [row.top_p for row in rows]
    floats[:, 6] = [row.floor for row in rows]
    return resident(mx.array(found.view(np.int32).reshape(-1)))


_COLUMNS = 7


def choose(logits: mx.array, plan: mx.array, drawn: int, width: int = 1) -> TokenArrays:
    """A token for each of `logits` [rows * width, vocab], `width` consecutive ones for each row of a plan.

    `plan` comes from `columns`; `drawn`: tokens that each row has drawn since then.
    """
    count = logits.shape[0]
    pair_count = max(_PAIR_COUNTS[0], 1 << (-(-count // _PAIR) - 1).bit_length())
    tokens, *pairs = _kernel(pair_count, logits.dtype)(
        inputs=[logits, plan, mx.array([drawn, width])],
        grid=(count * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(max(WORDS, count),)] + [(_PAIR,)] * pair_count,
    )
    return TokenArrays(tokens[:count], tuple(pairs[: -(-count // _PAIR)]))


def read(pairs: Sequence[mx.array], count: int) -> tuple[list[int], list[float]]:
    """Wait for the tokens and their logits: 0, or NaN for a logit that is not finite."""
    numbers: list[Any] = []
    for pair in pairs:
        numbers += pair.tolist()  # type: ignore[arg-type]
    return (
        [number & ~_NOT_FINITE for number in numbers[:count]],
        [math.nan if number & _NOT_FINITE else 0.0 for number in numbers[:count]],
    )


@cache
def _kernel(pair_count: int, dtype: mx.Dtype) -> Variant:
    kernel, arguments = _described(pair_count, dtype)
    variant = kernel.variant(*arguments)
    # After this one is on disk: the thread would compile it a second time.
    _provide_more(dtype)
    return variant


@cache
def _provide_more(dtype: mx.Dtype) -> None:
    """Compile the kernels for larger batches in a thread: compiled at its first use, one pauses every stream for a
    second."""
    described = [_described(pair_count, dtype) for pair_count in _PAIR_COUNTS]
    provide_later([kernel.to_provide(*arguments) for kernel, arguments in described])


def _described(
    pair_count: int, dtype: mx.Dtype
) -> tuple[Kernel, tuple[Template, list[mx.Dtype], list[mx.Dtype]]]:
    """The kernel that writes up to `pair_count` pairs of tokens, and the arguments of `Kernel.variant` for it."""
    # Arrays of 8 bytes are in host memory that the device maps, so no page migrates when the host reads them
    # (mlx/backend/cuda/allocator.cpp, SmallSizePool).
    names = [f"pair_{index}" for index in range(pair_count)]
    write_pair = (
        "  auto write_pair = [&](int at, unsigned int number) {\n"
        f"    unsigned int* const pairs[] = {{{', '.join(names)}}};\n"
        f"    pairs[at / {_PAIR}][at % {_PAIR}] = number;\n"
        "  };\n"
    )
    kernel = Kernel(
        name=f"draw_tokens_{pair_count}",
        input_names=["logits", "columns", "gained"],
        output_names=["tokens", *names],
        source=write_pair + kernel_text("draw.cu"),
    )
    template = [("T", dtype), ("COLUMNS", _COLUMNS)]
    return kernel, (template, [dtype, mx.int32, mx.int32], [mx.uint32] * (1 + pair_count))
