"""Facts of the model for a report, from its directory."""

from __future__ import annotations

import json
from pathlib import Path

from zmqengine.bench.reports.report import ModelFacts
from zmqengine.bench.targets.target import TargetError
from zmqengine.pico import BUNDLED, model_path

CARD = "zmqengine_random.json"


def model_directory(model: str) -> Path:
    """The directory of a bundled model or path. Raises TargetError if it is not a model."""
    if model in BUNDLED:
        return model_path(model)
    if not (Path(model) / "config.json").is_file():
        raise TargetError(
            f"{model} is not a model directory; `zmqengine bench model --out {model}` makes one"
        )
    return Path(model)


def model_facts(model: str) -> ModelFacts:
    """Name, size and whether its weights are random."""
    directory = model_directory(model)
    name = model if model in BUNDLED else directory.resolve().name
    card = directory / CARD
    if card.is_file():
        facts = json.loads(card.read_text(encoding="utf-8"))
        dtype = f"{facts['bits']} bits" if facts.get("bits") else facts["dtype"]
        return ModelFacts(
            name=f"{facts['shape']}, {facts.get('model_type', 'llama')}-shaped",
            random_weights=True,
            parameters=facts["parameters"],
            dtype=dtype,
        )
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return ModelFacts(name=name, dtype=str(config.get("torch_dtype") or config.get("dtype") or ""))
