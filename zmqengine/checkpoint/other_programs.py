"""Models that LM Studio and Ollama have fetched: directories that MLX can load, and others with the reason why not.

LM Studio keeps OWNER/NAME directories. Ollama keeps a manifest for each NAME:TAG that lists its blobs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_WEIGHTS = "application/vnd.ollama.image.model"
"""The media type of a layer that is one GGUF file."""
GGUF = "it is a GGUF file, which MLX cannot load: fetch the same model in mlx-lm's format (zmqengine pull)"
TENSORS = (
    "Ollama keeps its tensors as blobs, which mlx-lm cannot read: fetch the same model with zmqengine pull"
)


class Foreign(NamedTuple):
    """A model of another program: its directory, or why MLX cannot load it. `size_bytes` is what it takes on disk."""

    name: str
    directory: Path
    program: str
    problem: str = ""
    size_bytes: int = 0


def foreign_models() -> Iterator[Foreign]:
    """The models of all programs known here, by name."""
    yield from _lm_studio()
    yield from _ollama()


def lm_studio_directories() -> list[Path]:
    """The places where LM Studio keeps models: the one that was chosen in it, the usual one, and the one before."""
    home = Path.home()
    chosen: list[Path] = []
    for settings in (home / ".lmstudio" / "settings.json", home / ".cache" / "lm-studio" / "settings.json"):
        folder = _document(settings).get("downloadsFolder")
        if isinstance(folder, str) and folder:
            with contextlib.suppress(RuntimeError):
                # expanduser raises if the path names a user that does not exist.
                chosen.append(Path(folder).expanduser())
    usual = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    return [path for path in dict.fromkeys([*chosen, *usual]) if path.is_dir()]


def _lm_studio() -> Iterator[Foreign]:
    for root in lm_studio_directories():
        for directory in sorted(path for path in root.glob("*/*") if path.is_dir()):
            name = f"{directory.parent.name}/{directory.name}"
            gguf = list(directory.glob("*.gguf"))
            if (directory / "config.json").is_file():
                yield Foreign(name, directory, "LM Studio")
            elif gguf:
                yield Foreign(name, directory, "LM Studio", GGUF, sum(path.stat().st_size for path in gguf))


def _ollama() -> Iterator[Foreign]:
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()
    manifests = root / "manifests"
    for manifest in sorted(path for path in manifests.glob("*/*/*/*") if path.is_file()):
        _, owner, name, tag = manifest.relative_to(manifests).parts
        layers = _document(manifest).get("layers")
        layers = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
        size = sum(layer["size"] for layer in layers if isinstance(layer.get("size"), int))
        problem = GGUF if any(layer.get("mediaType") == _WEIGHTS for layer in layers) else TENSORS
        shown = name if owner == "library" else f"{owner}/{name}"
        yield Foreign(f"{shown}:{tag}", manifest, "Ollama", problem, size)


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
