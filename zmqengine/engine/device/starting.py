"""What it takes to start a computation."""

from __future__ import annotations

import mlx.core as mx


def start_computes() -> bool:
    """Whether to start a computation takes about as long as the computation: MLX lets ten operations wait, and on a CPU
    there are no larger ones. mlx/transforms.cpp, MAX_ACTIVE_TASKS."""
    return mx.default_device().type == mx.DeviceType.cpu
