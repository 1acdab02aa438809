"""Kernels are compiled once for a machine, and put where MLX reads them."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import mlx.core as mx
import pytest

from tests.support.cuda_kernels import Provided, forget, quantised
from zmqengine.engine.cuda import (
    between_products,
    draw_kernel,
    experts,
    kernel,
    nvrtc,
    plain_products,
    quantised_products,
)
from zmqengine.engine.cuda.kernel import Kernel
from zmqengine.engine.cuda.kernel_cache import KernelCache, module_name
from zmqengine.engine.cuda.nvrtc import Compiled, Nvrtc, NvrtcError
from zmqengine.engine.cuda.slot_attention import CudaAttention
from zmqengine.engine.cuda.slot_storage import CudaStorage
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.kv.slots import KVShape, Slots
from zmqengine.engine.models.attention import PlacedPiece
from zmqengine.engine.models.layers import (
    Experts,
    HeadShape,
    Linear,
    Norm,
    QueryKeyNorms,
    RotaryEmbedding,
    Router,
)

pytestmark = pytest.mark.cuda_emulated

BFLOAT16 = mx.bfloat16


class FakeCompiler:
    """Compiles to a text; notes names."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, name: str, expression: str, source: bytes) -> Compiled:
        """The text."""
        self.compiled.append(expression)
        return Compiled(b"code of " + source, f"mangled_{expression}")


def opened(directory: Path, compiler: FakeCompiler, architecture: str = "sm_90a") -> KernelCache:
    """A cache, as of one start of a worker."""
    return KernelCache(directory, architecture, lambda: compiler)  # type: ignore[arg-type,return-value]


def test_a_kernel_is_compiled_by_the_first_start_alone(tmp_path: Path) -> None:
    """The files are as MLX reads them: a line of the `.txt` has the kernel, a tab and its mangled name."""
    compiler, directory = FakeCompiler(), tmp_path / "ptx"
    for _ in range(2):
        cache = opened(directory, compiler)
        cache.provide("custom_kernel_a", "mlx::core::cu::custom_kernel_a", b"text")
    assert compiler.compiled == ["mlx::core::cu::custom_kernel_a"]
    assert cache.counts == {"on disk": 1}
    module = module_name("custom_kernel_a", b"text")
    assert sorted(path.name for path in directory.iterdir()) == [f"{module}.ptx", f"{module}.txt"]
    assert (directory / f"{module}.ptx").read_bytes() == b"code of text"
    lines = (directory / f"{module}.txt").read_text().splitlines()
    assert [line.split("\t") for line in lines if "\t" in line] == [
        ["mlx::core::cu::custom_kernel_a", "mangled_mlx::core::cu::custom_kernel_a"]
    ]


@pytest.mark.parametrize("harm", ["cut", "no names", "another device"])
def test_a_damaged_kernel_is_compiled_again(tmp_path: Path, harm: str) -> None:
    """MLX fails on a file that is cut, or made for another device."""
    compiler = FakeCompiler()
    opened(tmp_path, compiler).provide("a", "a", b"text")
    file = tmp_path / module_name("a", b"text")
    if harm == "cut":
        file.with_suffix(".ptx").write_bytes(b"code")
    elif harm == "no names":
        file.with_suffix(".txt").unlink()
    opened(tmp_path, compiler, "sm_100a" if harm == "another device" else "sm_90a").provide("a", "a", b"text")
    assert compiler.compiled == ["a", "a"]
    assert file.with_suffix(".ptx").read_bytes() == b"code of text"


def test_what_cannot_be_kept_is_left_to_mlx(tmp_path: Path) -> None:
    """Without a compiler, or a directory, or with a name that MLX cuts, nothing is written and nothing raised."""

    def without() -> Nvrtc:
        raise NvrtcError("no compiler")

    compiler, file = FakeCompiler(), tmp_path / "file"
    file.write_text("")
    caches = [KernelCache(tmp_path, "sm_90a", without), opened(file, compiler), opened(tmp_path, compiler)]
    for cache, name in zip(caches, ["a", "a", "a" * 240], strict=True):
        cache.provide(name, name, b"text")
        assert cache.counts == {"left to MLX": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_names_have_the_hash_of_the_standard_library() -> None:
    """Murmur2 of 64 bits, as computed by `std::hash<std::string>` of GCC 12; the empty string needs no arithmetic but
    the seed's."""
    assert module_name("a", b"") == "a_553e93901e462a6e"


@pytest.fixture
def every_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Names and texts of kernels of every file, in bfloat16."""
    found: set[tuple[str, str]] = set()

    def cuda_kernel(**_: Any) -> Any:
        return lambda *, output_shapes, output_dtypes, **_: list(map(mx.zeros, output_shapes, output_dtypes))

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: Provided(found))
    forget()
    build_every_kernel()
    yield found
    monkeypatch.undo()
    forget()


def build_every_kernel() -> None:
    """Call each function that has a kernel, for variants of unlike texts."""

    def zeros(*shape: int) -> mx.array:
        return mx.zeros(shape, BFLOAT16)

    storage = CudaStorage()
    slots = Slots([KVShape(2, 128, BFLOAT16)], 512, storage)
    norms = QueryKeyNorms(zeros(128), zeros(128), zeros(10, 128), 1e-6)
    for freqs in (None, mx.zeros((64,))):
        rotation = RotaryEmbedding(128, False, None if freqs is not None else 1e4, 1.0, freqs, 1.0)
        heads = HeadShape(8, 2, 128, 1.0, rotation, None if freqs is None else norms, None, BFLOAT16)
        attention = CudaAttention([heads], [0])
        layout = attention.begin([PlacedPiece(slots.take(1), 0, 3)], 64)
        attention.attend(layout, 0, [zeros(64, 1536)])
    (pool,) = slots.pools.values()
    storage.write(pool.keys, 0, 0, zeros(1, 1, 2, 3, 128))
    storage.read(pool.keys, 0, 0, 3)
    norm = Norm(zeros(4096), 1e-5)
    for added_norm, scale in ((None, None), (norm, zeros(1))):
        between_products.add_and_norm(zeros(2, 4096), zeros(2, 4096), norm, added_norm, scale)
    for rows, outputs, activation in ((8, 4096, ""), (32, 16_384, "gelu")):
        plain_products.few_rows(zeros(rows, 256), zeros(outputs, 256), zeros(outputs), activation=activation)
    linear, gate_up, down = Linear(zeros(4, 64)), Linear(zeros(4, 128, 64)), Linear(zeros(4, 64, 64))
    routers = [
        Router(linear, 2),
        Router(linear, 2, "sigmoid", normalised=True, bias=mx.zeros((4,)), scale=2.5),
        Router(linear, 2, "chosen", scale=zeros(4)),
    ]
    for router, activation in zip(routers, plain_products.ACTIVATIONS[1:], strict=True):
        mlp = Experts(router, (gate_up,), down, activation)
        for count in (2, 60):
            experts.mixture(zeros(count, 64), zeros(count, 4), mlp)
    for bits, group_size, mode in ((4, 64, "affine"), (8, 64, "affine"), (4, 32, "mxfp4")):

        def packed(*shape: int) -> Linear:
            return quantised(zeros(*shape), bits, group_size, mode)  # noqa: B023

        for count in (3, 40):
            quantised_products.few_rows(zeros(count, 256), packed(64, 256))
        quantised_products.dequantised(packed(64, 256))
        mlp = Experts(routers[0], (packed(4, 128, 64),), packed(4, 64, 64))
        experts.mixture(zeros(2, 64), zeros(2, 4), mlp)
    plan = draw_kernel.columns([draw_kernel.Drawn(1, 0, 1.0, 5, 0.9, -math.inf)])
    draw_kernel.choose(zeros(1, 1000), plan, 0)


def test_draws_of_more_tokens_are_compiled_before_there_are_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread: to compile a kernel is a pause of a second."""
    compiler = FakeCompiler()
    cache = opened(tmp_path, compiler)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: cache)
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **_: [])
    forget()
    draw_kernel._kernel(16, BFLOAT16)
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join()
    known = {name.rpartition("draw_tokens_")[2] for name in compiler.compiled}
    assert known == {f"{count}_bfloat16_t_7" for count in (16, 32, 64, 128, 256)}
    compiler.compiled.clear()
    for count in (32, 256):
        draw_kernel._kernel(count, BFLOAT16)
    forget()
    assert not compiler.compiled


def test_every_kernel_compiles_for_every_device(
    every_kernel: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, by the compiler that MLX for CUDA depends on."""
    if find_spec("nvidia") is None or find_spec("nvidia.cu13") is None:
        pytest.skip("nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed")
    package = Path(str(find_spec("nvidia.cu13").submodule_search_locations[0])).parents[1] / "mlx"  # type: ignore[union-attr,index]
    ctypes.CDLL(str(package.parent / "nvidia/cu13/lib/libnvrtc.so.13"), mode=ctypes.RTLD_GLOBAL)
    if not on_cuda():
        monkeypatch.setattr(nvrtc, "_check", lambda _: None)
        # CUDA's headers are looked for beside it.
        monkeypatch.setattr(nvrtc, "_mlx_directory", lambda: package)
    assert len(every_kernel) == 42
    newest, oldest = (Nvrtc(name, kernel.HEADERS) for name in ("sm_90a", "sm_80"))
    for name, text in sorted(every_kernel):
        # Both of one kernel, or the test takes twice as long.
        for compiler in (newest, oldest) if "part" in name else (newest,):
            compiled = compiler.compile(name, f"mlx::core::cu::{name}", text.encode())
            assert compiled.cubin.startswith(b"\x7fELF")
            assert name in compiled.mangled
    with pytest.raises(NvrtcError, match=r"NVRTC_ERROR_COMPILATION.*undefined"):
        newest.compile("a", "a", b"__global__ void a() { undefined(); }")


@pytest.mark.skipif(not on_cuda(), reason="no CUDA device")
def test_mlx_runs_the_kernel_that_is_on_disk(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of a kernel that writes 1 is the code of one that writes 2: it is what runs. And the text that MLX
    makes of a kernel is ours."""
    # MLX's default directory, where none was chosen before the import.
    directory = Path(tempfile.gettempdir(), "mlx", version("mlx"), "ptx")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", os.environ.get("MLX_PTX_CACHE_DIR", str(directory)))
    cache = kernel.kernel_cache.__wrapped__()
    assert cache is not None
    tried = Kernel(
        f"tried_{uuid4().hex}",
        ["a", "b"],
        ["out", "other"],
        "  if (a_ndim == a_shape[0]) out[b_strides[0] - 1] = 1;",
    )
    template = [("T", mx.float16), ("N", 3), ("YES", True), ("NO", False)]
    inputs, outputs = [mx.zeros((2, 3), BFLOAT16), mx.zeros((4,))], [mx.int32, mx.uint8]
    name, text = tried.generated(template, [one.dtype for one in inputs], outputs)
    module = module_name(name, text.encode())
    other = text.replace("= 1;", "= 2;").encode()
    cache._write(module, f"mlx::core::cu::{name}", cache._compile(module, f"mlx::core::cu::{name}", other))
    try:
        made = tried.variant(template, [one.dtype for one in inputs], outputs)(
            inputs=inputs, output_shapes=[(1,), (1,)], grid=(1, 1, 1), threadgroup=(1, 1, 1), verbose=True
        )
        assert made[0].item() == 2
    finally:
        for suffix in (".ptx", ".txt"):
            Path(os.environ["MLX_PTX_CACHE_DIR"], module + suffix).unlink(missing_ok=True)
    assert f"```\n{text}\n```" in capfd.readouterr().out
