"""Models on this machine: the hub's cache, and directories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from zmqengine.errors import ModelLoadError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""OWNER/NAME; what begins with a dot is a path."""


class Found(NamedTuple):
    """A model's directory, and its name for `--model`."""

    name: str
    directory: Path


def hub_cache() -> Path:
    """The cache directory of `huggingface_hub`: its variables, in its order."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def find_models(directories: Iterable[Path] = ()) -> Iterator[Found]:
    """Models in the hub's cache, by hub id, then models in the directories, one level deep."""
    for repository in sorted(hub_cache().glob("models--*--*")):
        snapshot = newest_snapshot(repository)
        if snapshot is not None and (snapshot / "config.json").is_file():
            owner, name = repository.name.removeprefix("models--").split("--", 1)
            yield Found(f"{owner}/{name}", snapshot)
    for directory in directories:
        for file in sorted([directory / "config.json", *directory.glob("*/config.json")]):
            if file.is_file():
                yield Found(str(file.parent), file.parent)


def newest_snapshot(repository: Path) -> Path | None:
    """The snapshot that `main` names, or else the newest."""
    try:
        named = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        if named.is_dir():
            return named
    except (OSError, ValueError):
        # None, or bytes that are no text.
        pass
    snapshots = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def find_model(model: str) -> Path | None:
    """The directory of `--model` if it is on this machine: a directory, or a hub id that was fetched. Raises
    `ModelLoadError` for what cannot be a path."""
    path = _path(model)
    if path.is_dir():
        return path
    if model.count("/") == 1:
        return newest_snapshot(hub_cache() / ("models--" + model.replace("/", "--")))
    return None


def local_directory(model: str) -> Path | None:
    """The directory that `--model` names; None for a hub id. Raises `ModelLoadError` for anything else."""
    path = _path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json: it is not a model in mlx-lm's format")
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file: give the directory of the model")
    if not HUB_ID.fullmatch(model):
        raise ModelLoadError(f"there is no directory {model}, and it is not a hub id (owner/name) either")
    return None


def _path(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        # Raises for a name that is too long; so does every later look at it.
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{model[:200]!r} cannot be a directory: {error}") from None
    return path
