"""Attention inside the trace of its layer, in steps that write every layer in place."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.cuda.test_packed_attention import head_shape, numbers
from tests.support import cuda_kernels, cuda_on_cpu
from tests.support.calls import calls_of
from tests.support.kv_kernels import memory
from tests.support.models import LLAMA, SLIDING, build_model
from zmqengine.engine import kv
from zmqengine.engine.cuda import attention, kernel
from zmqengine.engine.cuda.attention_in_place import TracedInPlace
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv.layout import Layout
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import HeadShape, read_weights
from zmqengine.engine.models.ops import PlainOps

pytestmark = pytest.mark.cuda_emulated

LAYERS = 6
CALLS_MAX = 10
"""Python and C functions that are called for a layer: 5 in this version."""


def caches_of(
    heads: HeadShape, layout: Layout, count: int, seed: int = 0, room: int = 512
) -> list[kv.RaggedKVCache]:
    """Caches of `count` layers that may be written in place."""
    found = []
    for number in range(count):
        cache = kv.RaggedKVCache(layout, None, None, number)
        shape = (len(layout.lengths), heads.key_heads, room, heads.dim)
        first = seed + 2 * number
        cache.joined(*(numbers(shape, each, heads.dtype) for each in (first, first + 1)))
        found.append(cache)
    return found


@pytest.mark.parametrize("as_written", [False, True])
@pytest.mark.parametrize("columns", [40, 400])
@pytest.mark.parametrize("rejected", [[], [0, 3, 1]])
@pytest.mark.parametrize("width", [1, 4])
def test_kernels_find_rows_and_columns_by_strides(
    monkeypatch: pytest.MonkeyPatch, as_written: bool, columns: int, rejected: list[int], width: int
) -> None:
    """Kernels get the first row and column of keys, values and marks; the columns are one part or several."""
    if as_written and (on_cuda() or not cuda_on_cpu.COMPILER):
        pytest.skip("the device runs them" if on_cuda() else "g++ is not installed")
    called = [] if on_cuda() else cuda_kernels.stand_in(monkeypatch, as_written=as_written)
    heads = head_shape(64, normed=True)
    rows = 3
    product = numbers((rows * width, 10 * heads.dim), 50, heads.dtype)
    layouts = [Layout(kv.PLAIN, [columns, 9, columns // 2]) for _ in range(2)]
    for layout in layouts:
        if rejected:
            layout.roll_back(rejected)
        layout.begin_step(width, idle=False)
    (ours,), (theirs,) = (caches_of(heads, layout, 1) for layout in layouts)
    traced = TracedInPlace([heads])
    step = traced.step([ours], width, ours.offset)
    assert step is not None
    assert [array.shape for array in (step.shared[-1], *step.layers[0])] == [(1, 1), *[(1, 2, 1, 64)] * 2]
    parts: Any = step.kind
    got = traced.attend(parts, heads, product, *step.shared, *step.layers[0])
    assert [wrote(got) for wrote in step.wrote] == [False]
    ops = PlainOps()
    mask = ops.mask(theirs, width, None)
    qkv = ops.rotate(product, heads, theirs.offset, rows)
    wanted = ops.attend(qkv, heads, theirs.offset, theirs, mask).transpose(0, 2, 1, 3).reshape(got.shape)
    assert np.abs(np.array(got) - np.array(wanted)).max() < 0.01
    for name in ("keys", "values", "offset"):
        assert mx.allclose(getattr(ours, name), getattr(theirs, name), atol=0.01)
    if not on_cuda():
        assert ("ragged_attention_join" in called) == (columns > 256)
        monkeypatch.undo()
        cuda_kernels.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Python calls. Every result depends on all that a kernel is given, and can be traced."""
    called: list[str] = []

    def cuda_kernel(*, name: str, **_: Any) -> Any:
        def call(
            *, inputs: Any, output_shapes: Any, output_dtypes: Any, template: Any, grid: Any, **_: Any
        ) -> list[mx.array]:
            called.append(name)
            sums = [mx.mean(array.astype(mx.float32)) * place for place, array in enumerate(inputs, 1)]
            found = mx.sin(mx.stack([*sums, mx.array(float(sum(grid)))]).sum())
            return [
                (found * mx.cos(mx.arange(int(np.prod(shape)))).reshape(shape)).astype(dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: None)
    cuda_kernels.forget()
    yield called
    monkeypatch.undo()
    cuda_kernels.forget()


def model_of(layers: int = LAYERS, **config: Any) -> DecoderModel:
    given = {**LLAMA, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": layers, **config}
    model = build_model(given)
    model.set_dtype(mx.float16)
    return DecoderModel(read_weights(model), CudaOps())


LENGTHS = [70, 30, 50, 61]


@pytest.mark.skipif(on_cuda(), reason="MLX fuses what stands in for kernels, and rounds it otherwise")
def test_a_trace_is_for_arrays_of_any_shape(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay equals the call while columns grow and rows roll back, join and leave; only another number of parts of
    the columns makes another trace."""

    def run(model: DecoderModel) -> Iterator[mx.array]:
        for seed, (lengths, room, rejected, width) in enumerate(
            [
                (LENGTHS, 128, [], 1),
                (LENGTHS, 256, [], 1),
                ([9, 8, 7, 6], 64, [0, 2, 1, 0], 1),
                ([300, 9, 9, 9], 512, [], 1),
                ([400, 9, 9, 9], 1024, [1, 2, 1, 0], 1),
                (LENGTHS, 128, [1, 0, 0, 0], 4),
                ([9, 8, 7, 6], 64, [], 4),
            ]
        ):
            layout = Layout(kv.PLAIN, lengths)
            caches = caches_of(model.heads[0], layout, LAYERS, seed, room)
            for turn in range(3):
                if rejected:
                    layout.roll_back(rejected)
                layout.begin_step(width, idle=False)
                inputs = mx.full((len(lengths), width), 7 * turn + seed, mx.uint32)
                yield model(inputs, cache=caches)
                assert layout.lengths == [int(length) for length in np.array(caches[-1].offset)]

    with monkeypatch.context() as apart:
        apart.setattr(mx, "compile", lambda function: function)
        wanted = list(run(model_of()))
    launched.clear()
    model, kernels = model_of(), []
    for got, expected in zip(run(model), wanted, strict=True):
        kernels.append(len(launched))
        launched.clear()
        assert not mx.any(mx.isnan(got))
        assert mx.allclose(got, expected, atol=1e-3)
    # The last step of each five: other arrays, the same trace.
    assert [step for step, count in enumerate(kernels) if count] == [0, 9, 15]
    assert not mx.allclose(wanted[0], wanted[3], atol=1e-2)
    assert {(rows, width) for rows, width, kind in model._traces.calls if kind} == {(4, 1), (4, 4)}


def test_steps_are_traced_ahead_in_every_number_of_parts(launched: list[str]) -> None:
    """So that no step of rows in decode waits for a trace."""
    model = model_of()
    model.trace_steps(4, float("inf"))
    assert "rotary_heads_into" in launched
    launched.clear()
    for rows in range(1, 5):
        for columns in (10, 300, 1100):
            layout = Layout(kv.PLAIN, [columns] * rows)
            caches = caches_of(model.heads[0], layout, LAYERS, room=2048)
            layout.begin_step(1, idle=False)
            mx.eval(model(mx.zeros((rows, 1), mx.uint32), cache=caches))
    assert not launched


def test_a_trace_does_not_keep_the_arrays_of_a_batch(launched: list[str]) -> None:
    """Neither do the layers, once they have others."""
    model = model_of()

    def bytes_behind(room: int) -> int:
        layout = Layout(kv.PLAIN, LENGTHS)
        caches = caches_of(model.heads[0], layout, LAYERS, room=room)
        for _ in range(2):
            layout.begin_step(1, idle=False)
            mx.eval(model(mx.zeros((4, 1), mx.uint32), cache=caches))
        layout.replaced()
        for cache in caches:
            cache.joined(cache.keys[:, :, :128] + 0, cache.values[:, :, :128] + 0)
            mx.eval(cache.keys, cache.values)
        mx.synchronize()
        return mx.get_active_memory()

    before = bytes_behind(256)
    assert launched
    of_layer = 2 * 4 * model.heads[0].key_heads * 4096 * 64 * 2
    assert bytes_behind(4096) - before < of_layer / 2


def test_a_layer_of_a_step_is_one_call(launched: list[str]) -> None:
    """The host's time for the calls was most of a step on a GPU."""
    counts = []
    for layers in (LAYERS, 2 * LAYERS):
        model = model_of(layers)
        layout = Layout(kv.PLAIN, LENGTHS)
        caches = caches_of(model.heads[0], layout, layers)
        step = partial(model, mx.zeros((4, 1), mx.uint32), cache=caches)
        # The first step traces.
        layout.begin_step(1, idle=False)
        step()
        layout.begin_step(1, idle=False)
        launched.clear()
        counts.append(calls_of(step)[1])
        assert not launched
    of_layer = (counts[1] - counts[0]) / LAYERS
    print(f"{of_layer:.0f} calls a layer")
    assert of_layer <= CALLS_MAX


@pytest.mark.parametrize("apart", [False, True])
def test_a_kernel_is_looked_for_once(
    launched: list[str], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """In files and among those that were made: not in each layer, whose norms are arrays of its own, nor in a step."""
    model = model_of(model_type="qwen3", num_key_value_heads=2)
    if apart:
        model = DecoderModel(model.weights, model.ops, traces_attention=False)
    looked: list[Any] = []
    variant = kernel.Kernel.variant
    monkeypatch.setattr(attention, "kernel_text", lambda *names: looked.append(names) or kernel_text(*names))
    monkeypatch.setattr(
        kernel.Kernel, "variant", lambda self, *given: looked.append(self) or variant(self, *given)
    )
    layout = Layout(kv.PLAIN, LENGTHS)
    caches = caches_of(model.heads[0], layout, LAYERS)
    layout.begin_step(4, idle=False)
    model(mx.zeros((4, 4), mx.uint32), cache=caches)
    kinds = [one for one in looked if isinstance(one, kernel.Kernel) and one._name == "rotary_heads_into"]
    assert len(kinds) == 1
    looked.clear()
    layout.begin_step(4, idle=False)
    model(mx.zeros((4, 4), mx.uint32), cache=caches)
    # Another number of rows, and another trace.
    layout = Layout(kv.PLAIN, LENGTHS[1:])
    caches = caches_of(model.heads[0], layout, LAYERS)
    layout.begin_step(4, idle=False)
    model(mx.zeros((3, 4), mx.uint32), cache=caches)
    assert launched
    assert not looked


def test_an_idle_device_starts_on_the_first_layers(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host builds the others."""
    model = model_of()
    layout = Layout(kv.PLAIN, LENGTHS)
    caches = caches_of(model.heads[0], layout, LAYERS)
    started: list[int] = []
    own = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (started.append(len(arrays)), own(*arrays)))
    for idle in (True, False):
        layout.begin_step(1, idle=idle)
        mx.eval(model(mx.zeros((4, 1), mx.uint32), cache=caches))
        # Layers 1 and 5, of which the last gives the logits.
        assert started == [2, 1]


def test_a_constant_is_not_computed_in_a_trace() -> None:
    """It is computed when it is made: a trace would compute it again in every step."""
    attention.scalar.cache_clear()
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.abs(attention.scalar(0.375)))
    assert re.findall(r'label ="([^"]+)", shape=rectangle', graph.getvalue()) == ["Abs"]


@pytest.mark.usefixtures("launched")
def test_steps_that_are_not_written_in_place_are_not_traced_so() -> None:
    """One layer is enough, and a layer with a window for all steps."""
    heads = head_shape(64)
    traced = TracedInPlace([heads, heads])
    layout = Layout(kv.PLAIN, LENGTHS)
    caches: list[Any] = caches_of(heads, layout, 2, room=128)
    layout.begin_step(1, idle=False)
    offset = caches[0].offset
    assert traced.step(caches, 1, offset) is not None
    assert traced.step(caches, 2, offset) is None
    shared = kv.RaggedKVCache(layout, caches[1].keys, caches[1].values, 1)
    assert traced.step([caches[0], shared], 1, offset) is None
    assert traced.step([caches[0], kv.RowKVCache()], 1, offset) is None
    for _ in range(8):
        layout.begin_step(8, idle=False)
    assert traced.step(caches, 8, offset) is None
    ops = CudaOps()
    assert ops.traced_attention([heads, heads]) is not None
    assert ops.traced_attention([heads, heads._replace(window=8)]) is None
    assert ops.traced_attention([heads, heads._replace(dim=96)]) is None
    assert model_of(**{**SLIDING, "head_dim": 64}).traced_attention is None
    assert DecoderModel(model_of().weights, PlainOps()).traced_attention is None


@pytest.mark.skipif(on_cuda(), reason="memory of a CUDA device")
def test_a_corner_is_a_view_that_mlx_s_own_write_does_not_see() -> None:
    """It has the strides and the memory of the arrays, and does not make MLX copy them."""
    heads = head_shape(64)
    layout = Layout(kv.PLAIN, LENGTHS)
    (cache,) = caches_of(heads, layout, 1)
    whole, corner = memory(cache.keys), memory(cache.corners[0])
    assert corner.shape == (1, heads.key_heads, 1, heads.dim)
    assert (corner.strides, corner.ctypes.data) == (whole.strides, whole.ctypes.data)
    assert cache.corners[0] is cache.corners[0]
    address = whole.ctypes.data
    del whole, corner
    layout.begin_step(1, idle=False)
    columns = numbers((4, heads.key_heads, 1, heads.dim), 3, heads.dtype)
    mx.eval(columns)
    cache.write(columns, columns)
    assert memory(cache.keys).ctypes.data == address
    first = cache.corners[1]
    rows = [memory(array) for array in cache.all_rows()]
    cache.show_rows(3, (cache.keys, cache.values))
    assert cache.corners[1] is not first
    assert memory(cache.corners[1]).ctypes.data == rows[1].ctypes.data
    cache.keys = cache.keys
    with pytest.raises(AssertionError, match="another reference"):
        _ = cache.corners
