"""MLX's own kernels for CUDA are compiled by child processes while a worker starts."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.load import mlx_kernels


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of MLX's kernels."""
    monkeypatch.setattr(mlx_kernels, "cuda_version", lambda: "0.32.4")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    return tmp_path / "ptx"


def test_children_compile_what_is_missing_and_once(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Kernels that MLX has written itself are there, too."""
    names = ["gather_uint32_int64_2", "scatter_float32_int64_Sum_2", "gather_bfloat16_int32_1"]
    monkeypatch.setattr(mlx_kernels, "names_for", lambda dtype: names)
    directory.mkdir()
    (directory / "gather_bfloat16_int32_1.ptx").write_bytes(b"code")
    wait = mlx_kernels.start_children("bfloat16")
    assert wait is not None
    wait()
    assert {path.name for path in directory.iterdir()} >= {
        "gather_bfloat16_int32_1.ptx", "gather_uint32_int64_2.compiled", "scatter_float32_int64_Sum_2.compiled",
    }  # fmt: skip
    assert mlx_kernels.start_children("bfloat16") is None


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """And MLX compiles in the worker."""
    monkeypatch.setattr(mlx_kernels, "names_for", lambda dtype: ["gather_uint32_int64_2"])
    monkeypatch.setattr(mlx_kernels, "CHILDREN_S", 0.0)
    wait = mlx_kernels.start_children("bfloat16")
    assert wait is not None
    wait()
    assert not list(directory.glob("*.compiled"))


def test_files_appear_when_they_are_complete(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """MLX, which fails on others, never sees the directory in which a child writes."""

    def computation(_: object, name: str) -> mx.array:
        aside = Path(os.environ["MLX_PTX_CACHE_DIR"])
        assert aside.parent == directory
        assert not list(directory.glob("*.ptx"))
        for suffix in (".ptx", ".txt", ".cu"):
            (aside / f"{name}{suffix}").write_text(suffix)
        return mx.zeros(1)

    monkeypatch.setattr(mlx_kernels, "computation", computation)
    mlx_kernels.main(directory, ["gather_a"])
    assert sorted(path.name for path in directory.iterdir()) == [
        "gather_a.compiled", "gather_a.cu", "gather_a.ptx", "gather_a.txt",
    ]  # fmt: skip


def test_without_cuda_there_is_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the type of the model."""
    monkeypatch.setattr(mlx_kernels, "cuda_version", lambda: "")
    assert mlx_kernels.start_children("bfloat16") is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_kernel_has_a_computation(dtype: str) -> None:
    """The computation has the types in the kernel's name."""
    for name in mlx_kernels.names_for(dtype):
        if name.startswith(("gather", "scatter")):
            found = mlx_kernels.computation(mx, name)
            kind, *types = name.split("_")
            assert str(found.dtype) == f"mlx.core.{types[1] if types[0] == 'axis' else types[0]}", kind
            mx.eval(found)


@pytest.mark.skipif(not on_cuda(), reason="no CUDA device")
def test_mlx_names_its_kernels_as_here(directory: Path) -> None:
    """Gathers and scatters have the names expected here, and every fused kernel a file."""
    names = mlx_kernels.names_for("bfloat16")
    wait = mlx_kernels.start_children("bfloat16")
    assert wait is not None
    wait()
    found = {path.stem for path in directory.glob("*.ptx")}
    assert {name for name in names if name.startswith(("gather", "scatter"))} <= found
    # A mask takes two.
    assert len(found) == len(names) + 1
