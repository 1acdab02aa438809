"""Which of MLX's backends computes: that of the default device."""

from __future__ import annotations

import mlx.core as mx


def on_gpu() -> bool:
    """Whether a GPU does, by Metal or CUDA."""
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    """Whether a GPU does, by CUDA."""
    return on_gpu() and mx.cuda.is_available()
