"""Kernels of CUDA, or what stands in for them on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import cuda_kernels, cuda_on_cpu
from zmqengine.engine.host.backend import on_cuda


@pytest.fixture
def kernels_as_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels on CUDA; elsewhere their text on the CPU."""
    if on_cuda():
        yield
        return
    if not cuda_on_cpu.COMPILER:
        pytest.skip("g++ is not installed")
    cuda_kernels.stand_in(monkeypatch, as_written=True)
    yield
    monkeypatch.undo()
    cuda_kernels.forget()


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Plain arithmetic in place of the kernels; the names of those that are called."""
    if on_cuda():
        pytest.skip("the kernels are there")
    yield cuda_kernels.stand_in(monkeypatch)
    monkeypatch.undo()
    cuda_kernels.forget()


@pytest.fixture(params=["plain_kernels", "kernels_as_written"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The kernels on CUDA; elsewhere plain arithmetic in their place, or their text on the CPU."""
    name: str = request.param
    request.getfixturevalue(name)
    return name
