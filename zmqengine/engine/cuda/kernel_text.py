"""The source of a kernel, without comments and indentation: MLX hashes the whole text at every call."""

from __future__ import annotations

from importlib.resources import files


def kernel_text(*names: str) -> str:
    """These files concatenated, without comments and indentation."""
    lines = [line.strip() for name in names for line in _read(name).splitlines()]
    return "\n".join(line.partition(" //")[0] for line in lines if line and not line.startswith("//")) + "\n"


def _read(name: str) -> str:
    assert __package__
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
