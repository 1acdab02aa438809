"""Directories of adapters for engines without a model."""

from __future__ import annotations

import json
from pathlib import Path


def write_opaque_adapter(directory: Path, size: int = 1000, fill: bytes = b"a") -> str:
    """An adapter whose arrays nothing reads, of this size; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapters.safetensors").write_bytes(fill * size)
    (directory / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 2.0}}))
    return str(directory)
