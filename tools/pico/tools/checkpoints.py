"""The state of a training run on disk, from which it goes on after it was stopped."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten


class Checkpoints:
    """Weights at the end of each stage, and weights and optimizer of the stage that is running.

    Without a `directory` nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        if directory:
            directory.mkdir(parents=True, exist_ok=True)

    def finished(self, stage: str) -> dict[str, mx.array] | None:
        """The weights at the end of a stage, if it has been done."""
        path = self._path(f"{stage}.safetensors")
        return _load(path) if path and path.exists() else None

    def finish(self, stage: str, model: Any) -> None:
        """Keep the weights at the end of a stage."""
        if path := self._path(f"{stage}.safetensors"):
            _write(path, dict(tree_flatten(model.parameters())), {})

    def resume(self, stage: str, model: Any, optimizer: Any) -> int:
        """Put a stage that was stopped back where it was; the steps that are done."""
        path = self._path(f"{stage}-running.safetensors")
        if not path or not path.exists():
            return 0
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays: dict[str, mx.array] = loaded[0]
        model.load_weights(
            [(k.removeprefix("model."), v) for k, v in arrays.items() if k.startswith("model.")]
        )
        state = [(k.removeprefix("optimizer."), v) for k, v in arrays.items() if k.startswith("optimizer.")]
        optimizer.state = tree_unflatten(state)
        return int(loaded[1]["steps"])

    def save(self, stage: str, model: Any, optimizer: Any, steps: int) -> None:
        """Keep a stage that is running."""
        if path := self._path(f"{stage}-running.safetensors"):
            parts = {"model": model.parameters(), "optimizer": optimizer.state}
            arrays = {
                f"{part}.{name}": array
                for part, tree in parts.items()
                for name, array in dict(tree_flatten(tree)).items()
            }
            _write(path, arrays, {"steps": str(steps)})

    def _path(self, name: str) -> Path | None:
        return self._directory / name if self._directory else None


def _load(path: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(path))
    return dict(loaded)


def _write(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    # Whoever is stopped while writing leaves the last state whole.
    unfinished = path.with_suffix(".new.safetensors")
    mx.save_safetensors(str(unfinished), arrays, metadata=metadata)
    os.replace(unfinished, path)
