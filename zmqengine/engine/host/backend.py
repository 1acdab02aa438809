"""Which of MLX's backends computes: that of the default device."""

from __future__ import annotations

import mlx.core as mx


def on_gpu() -> bool:
    """Whether a GPU does, by Metal or CUDA."""
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    """Whether a GPU does, by CUDA."""
    return on_gpu() and mx.cuda.is_available()


def on_hopper() -> bool:
    """Whether a GPU of compute capability 9.0 does, an H100 or H200, which has products that no other has."""
    return on_cuda() and mx.device_info().get("architecture") == "sm_90"


def start_computes() -> bool:
    """Whether to start a computation takes about as long as the computation: MLX lets ten operations wait, and on a CPU
    there are no larger ones. mlx/transforms.cpp, MAX_ACTIVE_TASKS."""
    return not on_gpu()
