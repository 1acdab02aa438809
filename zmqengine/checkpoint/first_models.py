"""A first model from the hub, by the memory of the machine."""

from __future__ import annotations

# Parameters, with 4 bits and a scale and a bias for each group of 64: 4.5 bits each.
_PARAMETERS = (
    ("mlx-community/Qwen3-0.6B-4bit", 0.6e9),
    ("mlx-community/Qwen3-1.7B-4bit", 1.7e9),
    ("mlx-community/Qwen3-4B-4bit", 4.0e9),
    ("mlx-community/Qwen3-8B-4bit", 8.2e9),
    ("mlx-community/Qwen3-14B-4bit", 14.8e9),
    ("mlx-community/Qwen3-32B-4bit", 32.8e9),
)
_BITS = 4.5


def first_model(limit_bytes: int) -> tuple[str, int] | None:
    """The largest of a few common models whose weights leave half of the memory for chats, and its bytes."""
    sizes = [(name, int(parameters * _BITS / 8)) for name, parameters in _PARAMETERS]
    return next((each for each in reversed(sizes) if 2 * each[1] <= limit_bytes), None)


def advice(limit_bytes: int) -> str:
    """The command that fetches it, and its size; empty where none fits."""
    model = first_model(limit_bytes)
    if model is None:
        return ""
    name, size = model
    return f"`zmqengine pull {name}` fetches one that fits ({size / 1e9:.1f} GB)"
