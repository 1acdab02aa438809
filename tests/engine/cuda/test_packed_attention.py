"""Segments of a packed step attend together as each of them does by MLX's operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels, cuda_on_cpu
from tests.support.calls import calls_of
from tests.support.models import LLAMA, build_model
from zmqengine.engine import kv
from zmqengine.engine.cuda import attention, kernel, packed_attention
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv.layout import Layout
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import HeadShape, QueryKeyNorms, RotaryEmbedding, read_weights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.segment import Segment

pytestmark = pytest.mark.cuda_emulated


@pytest.fixture(params=["plain arithmetic", "as written"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels on CUDA; elsewhere plain arithmetic in their place, or their text on the CPU."""
    as_written = request.param == "as written"
    if on_cuda():
        if as_written:
            pytest.skip("the device runs them")
        yield "kernels"
        return
    if as_written and not cuda_on_cpu.COMPILER:
        pytest.skip("g++ is not installed")
    cuda_kernels.stand_in(monkeypatch, as_written=as_written)
    yield request.param
    monkeypatch.undo()
    cuda_kernels.forget()


def head_shape(dim: int, dtype: mx.Dtype = mx.float16, *, normed: bool = False) -> HeadShape:
    norms = None
    if normed:
        queries, keys = (numbers((dim,), seed, dtype) for seed in (1, 2))
        both = mx.concatenate([mx.broadcast_to(queries, (6, 1, dim)), mx.broadcast_to(keys, (2, 1, dim))])
        norms = QueryKeyNorms(queries, keys, both, 1e-6)
    rotation = RotaryEmbedding(dim, False, 1e4, 1.0, None, 1.0)
    return HeadShape(6, 2, dim, dim**-0.5, rotation, norms, None, dtype)


def numbers(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def batch(heads: HeadShape, lengths: list[int], width: int, seed: int, rejected: list[int]) -> Any:
    """The cache of a layer of rows that are about to step; of each the last tokens were `rejected`."""
    layout = Layout(kv.PLAIN, lengths)
    room = -(-layout.columns // 64) * 64 + 64
    cache = kv.RaggedKVCache(layout, None, None, 1)
    shape = (len(lengths), heads.key_heads, room, heads.dim)
    cache.joined(numbers(shape, seed, heads.dtype), numbers(shape, seed + 1, heads.dtype))
    if rejected:
        layout.roll_back(rejected)
    layout.begin_step(width, idle=False)
    return cache


def row(heads: HeadShape, length: int, width: int, seed: int) -> Any:
    """The cache of a layer of a prompt whose next tokens are about to be read."""
    cache = kv.RowKVCache()
    shape = (1, heads.key_heads, -(-(length + width) // 64) * 64, heads.dim)
    cache.own(numbers(shape, seed, heads.dtype), numbers(shape, seed + 1, heads.dtype))
    cache.offset = length
    return cache


@pytest.mark.parametrize(("dim", "dtype"), [(64, mx.float16), (128, mx.bfloat16)])
@pytest.mark.parametrize("columns", [40, 400])
@pytest.mark.parametrize("rejected", [[], [0, 3, 1]])
def test_segments_attend_together(
    kernels: str, dim: int, dtype: mx.Dtype, columns: int, rejected: list[int]
) -> None:
    """Rows of unlike lengths, verify blocks, prompts and texts side by side, in one part of the columns or in several;
    padding gives zeros. The longest prompt has queries for all warps of a block."""
    if kernels == "plain arithmetic":
        # NumPy has no bfloat16.
        dtype = mx.float16
    heads = head_shape(dim, dtype, normed=dim == 64)
    lengths, padding = [4, 1, 20, 4], 7
    widths = [1, 3, 30, 5, *lengths]

    def caches() -> list[Any]:
        return [
            batch(heads, [columns, 9, columns // 2], 1, 10, rejected),
            batch(heads, [7, columns - 1], 3, 20, []),
            row(heads, columns - 30, 30, 30),
            row(heads, 0, 5, 40),
        ]

    rows = [3, 2, *[1] * 6]
    tokens = sum(count * width for count, width in zip(rows, widths, strict=True))
    product = numbers((tokens + padding, 10 * dim), 50, dtype)
    together = [*caches(), row(heads, 0, sum(lengths), 60)]
    given: list[int | list[int]] = [*widths[:4], lengths]
    segments = [([cache], width) for cache, width in zip(together, given, strict=True)]
    packed = packed_attention.TracedPacked([heads])
    step = packed.step(segments, tokens + padding)
    assert step is not None
    got = packed.attend(step.kind, heads, product, *step.shared, *step.layers[0])
    assert not step.wrote[0](got)
    ops = PlainOps()
    alone = [*caches(), *(row(heads, 0, length, 60) for length in lengths)]
    wanted, start = [], 0
    for cache, width, count in zip(alone, widths, rows, strict=True):
        own = product[start : start + count * width]
        start += count * width
        mask = ops.mask(cache, width, None)
        attended = ops.attend(ops.rotate(own, heads, cache.offset, count), heads, cache.offset, cache, mask)
        wanted.append(attended.transpose(0, 2, 1, 3).reshape(count * width, -1))
    expected, found = (np.array(each.astype(mx.float32)) for each in (mx.concatenate(wanted), got))
    # One rounding of a number of about 1, and some of a product of them.
    tolerance = 0.01 if dtype == mx.float16 else 0.05
    assert np.abs(found[:tokens] - expected).max() < tolerance
    assert not found[tokens:].any()
    for name in ("keys", "values"):
        for one, other in zip(together[:4], alone, strict=False):
            assert mx.allclose(getattr(one, name), getattr(other, name), atol=tolerance)
        of_texts = mx.concatenate([getattr(each, name)[..., : each.offset, :] for each in alone[4:]], axis=2)
        assert mx.allclose(getattr(together[4], name)[..., : sum(lengths), :], of_texts, atol=tolerance)


@pytest.mark.parametrize(("dim", "dtype"), [(64, mx.float16), (128, mx.bfloat16)])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("is_marked", [False, True])
def test_rows_with_queries_for_all_warps(
    kernels: str, dim: int, dtype: mx.Dtype, parts: int, is_marked: bool
) -> None:
    """Three blocks a row and head, the last with few queries and one with those of two heads. Columns of no row are not
    read: they are not numbers."""
    if kernels == "plain arithmetic":
        pytest.skip("the kernel's text is tried")
    rows, heads, key_heads, width, columns, room = 3, 6, 2, 45, 150, 170
    starts = [0, 40, 103]
    queries, keys, values = (
        numbers(shape, seed, dtype)
        for seed, shape in enumerate(
            [(rows, heads, width, dim), (rows, key_heads, room, dim), (rows, key_heads, room, dim)]
        )
    )
    place = mx.arange(columns)[None, None]
    sees = (place >= mx.array(starts)[:, None, None]) & (place <= columns - width + mx.arange(width)[:, None])
    marks = np.zeros((rows, columns), np.uint8)
    if is_marked:
        marks[0, 10:40] = marks[1, 60] = marks[2, 104] = 1
    mask = (sees & (mx.array(marks) == 0)[:, None])[:, None]
    spans = kv.Spans(
        mx.array(starts, dtype=mx.int32),
        columns,
        mx.array([columns], dtype=mx.int32),
        mx.array(marks) if is_marked else None,
        lambda: mask,
    )
    used = (array[:, :, :columns].astype(mx.float32) for array in (keys, values))
    wanted = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *used, scale=0.1, mask=mask)
    of_a_row = (mx.arange(room) >= mx.array(starts)[:, None]) & (mx.arange(room) < columns)
    keys, values = (mx.where(of_a_row[:, None, :, None], array, float("nan")) for array in (keys, values))
    got = attention.ragged_attention(queries, keys, values, spans, 0.1, parts)
    expected, found = (np.array(array.astype(mx.float32)) for array in (wanted, got))
    assert np.abs(found - expected).max() < (0.003 if dtype == mx.float16 else 0.03)


@pytest.mark.usefixtures("kernels")
def test_segments_that_may_not_be_written_in_place_attend_alone() -> None:
    """Whatever the others may."""
    heads = head_shape(64)
    shared = batch(heads, [9, 5], 1, 10, [])
    shared.keys = shared.keys
    full = row(heads, 64, 20, 30)
    full.offset = 120
    prompt = row(heads, 30, 20, 30)
    packed = packed_attention.TracedPacked([heads])
    assert packed.step([([shared], 1), ([prompt], 20)], 22) is None
    assert packed.step([([prompt], 20), ([full], 20)], 40) is None
    many = [([row(heads, 3, 2, number)], 2) for number in range(packed_attention.SEGMENTS + 1)]
    assert packed.step(many, 18) is None
    assert packed.step(many[1:], 16) is not None
    ops = CudaOps()
    assert ops.packed_attention([heads]) is not None
    for unlike in (heads._replace(window=8), heads._replace(dtype=mx.float32), heads._replace(heads=4)):
        assert ops.packed_attention([heads, unlike]) is None


LAYERS = 4
CALLS_MAX = 50
"""Python and C functions that are called for a layer: 40 in this version."""


def test_a_layer_of_a_packed_step_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of segments: the host's time for them was most of such a step on a GPU. Python calls the
    kernels of the last layer, and the norms of the logits."""
    called: list[str] = []

    def cuda_kernel(*, name: str, **_: Any) -> Any:
        def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            called.append(name)
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: None)
    cuda_kernels.forget()
    steps = []
    for layers in (LAYERS, 2 * LAYERS):
        plain = build_model({**LLAMA, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": layers})
        plain.set_dtype(mx.float16)
        model = DecoderModel(read_weights(plain), CudaOps())
        model.packed(segments_of(model))
        traced = [*called]
        # Other rows, and arrays of other sizes, with as many tokens and about as many tiles.
        segments = segments_of(model, longer=64)
        called.clear()
        _, calls = calls_of(partial(model.packed, segments))
        steps.append((calls, traced, [*called]))
        called.clear()
    cuda_kernels.forget()
    (fewer_calls, *fewer), (more_calls, *more) = steps
    of_layer = (more_calls - fewer_calls) / LAYERS
    print(f"{of_layer:.0f} calls a layer; kernels: {fewer}")
    assert fewer == more
    traced, replayed = fewer
    for name in ("rotary_heads_packed", "packed_attention"):
        assert [traced.count(name), replayed.count(name)] == [2, 1]
    assert not {"rotary_heads_into", "ragged_attention", "window_attention"} & {*traced, *replayed}
    assert of_layer <= CALLS_MAX


def segments_of(model: DecoderModel, longer: int = 0) -> list[Segment]:
    """Two batches in decode and two prompts."""
    heads = model.heads[0]
    found = []
    for lengths in ([90, 40, 70 + longer], [200, 180]):
        layers = [batch(heads, lengths, 1, 0, []) for _ in model.layers]
        found.append(Segment(mx.zeros((len(lengths), 1), mx.uint32), layers))
    for length, width in ((60, 30), (0, 50)):
        layers = [row(heads, length + longer, width, 0) for _ in model.layers]
        found.append(Segment(mx.zeros((1, width), mx.uint32), layers))
    return found
