"""A first model by the memory of the machine."""

from __future__ import annotations

import pytest

from zmqengine.checkpoint.first_models import advice, first_model


@pytest.mark.parametrize(
    ("gib", "name"),
    [(8, "Qwen3-4B-4bit"), (16, "Qwen3-14B-4bit"), (64, "Qwen3-32B-4bit"), (1, "Qwen3-0.6B-4bit")],
)
def test_half_of_the_memory_is_left(gib: int, name: str) -> None:
    """The advice is a command that can be typed."""
    model = first_model(gib << 30)
    assert model is not None
    assert model[0] == f"mlx-community/{name}"
    assert 2 * model[1] <= gib << 30
    assert f"zmqengine pull {model[0]}" in advice(gib << 30)


def test_a_small_machine_gets_no_advice() -> None:
    """Nothing is named that would not fit."""
    assert advice(1 << 28) == ""
