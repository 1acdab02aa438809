"""Muon for the matrices in the layers, Adam for embeddings and norms."""

from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim

_WARM_UP_STEPS = 50


def make_optimizer(matrix_rate: float, other_rate: float, fall_steps: int, end: float) -> optim.Optimizer:
    """An optimizer whose rates rise in the first steps, then fall to `end` times that, which `fall_steps` reach."""
    muon = optim.Muon(_schedule(matrix_rate, fall_steps, end), weight_decay=0.0)
    adam = optim.AdamW(_schedule(other_rate, fall_steps, end), betas=[0.9, 0.98], weight_decay=0.0)

    def is_matrix(path: str, weight: mx.array) -> bool:
        return weight.ndim == 2 and "embed_tokens" not in path

    return optim.MultiOptimizer([muon, adam], [is_matrix])


def rate_share(steps: int, fall_steps: int, end: float) -> float:
    """What is left of the peak rate after `steps` of the steps in which it falls to `end` of it."""
    warm_up = _warm_up(fall_steps)
    return 1 - (1 - end) * max(0, steps - warm_up) / max(1, fall_steps - warm_up)


def _warm_up(steps: int) -> int:
    return min(_WARM_UP_STEPS, steps // 10 + 1)


def _schedule(peak: float, steps: int, end: float) -> Callable[[mx.array], mx.array]:
    warm_up = _warm_up(steps)
    later = optim.linear_schedule(peak, peak * end, max(1, steps - warm_up))
    return optim.join_schedules([optim.linear_schedule(0.0, peak, warm_up), later], [warm_up])
