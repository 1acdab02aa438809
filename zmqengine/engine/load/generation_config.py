"""Recommended sampling parameters of a model: `generation_config.json` beside its weights, as transformers writes
it."""

from __future__ import annotations

import json
import math
from pathlib import Path

_BOUNDS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (0, 1 << 31)}


def sampling_facts(directory: Path) -> dict[str, str | bool | int]:
    """`default_temperature`, `default_top_p` and `default_top_k`, as text, where the file has them.

    Values out of bounds and a file that cannot be read are ignored: these are recommendations.
    """
    try:
        config = json.loads((directory / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    facts: dict[str, str | bool | int] = {}
    for name, (low, high) in _BOUNDS.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isfinite(value) and low <= value <= high:
            facts[f"default_{name}"] = str(int(value) if name == "top_k" else float(value))
    return facts
