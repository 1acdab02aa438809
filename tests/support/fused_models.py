"""Models whose layers have fewer kernels and write caches in place, as on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.models import LLAMA, build_model
from zmqengine.engine.autotune import attention, layers, projections

FUSABLE: dict[str, Any] = {**LLAMA, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}


@contextmanager
def written_in_place() -> Iterator[Any]:
    """A model of `FUSABLE`, until the end. Elsewhere than on CUDA its kernels need a stand-in."""
    model = build_model(FUSABLE)
    projections.join_groups(model)
    attention.install(model)
    layers.install(model, fuses=True)
    try:
        assert layers.count_fused(model) == FUSABLE["num_hidden_layers"]
        yield model
    finally:
        layers.uninstall(model)
        attention.uninstall(model)
