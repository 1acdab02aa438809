"""Kernels of CUDA, or their text on a CPU."""

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
