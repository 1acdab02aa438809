"""MLX's back-end of the default device."""

from __future__ import annotations

import mlx.core as mx


def on_gpu() -> bool:
    """Whether MLX computes on a GPU, by Metal or CUDA."""
    return mx.default_device().type == mx.DeviceType.gpu


def on_cuda() -> bool:
    """Whether MLX computes on a GPU by CUDA."""
    return on_gpu() and mx.cuda.is_available()
