"""The source of a kernel, without comments and indentation: MLX hashes the whole text at every call."""

from __future__ import annotations

from importlib.resources import files
from itertools import groupby


def kernel_text(*names: str) -> str:
    """These files concatenated, without comments and indentation."""
    lines = [line.strip() for name in names for line in _read(name).splitlines()]
    return "\n".join(line.partition(" //")[0] for line in lines if line and not line.startswith("//")) + "\n"


def for_each(text: str, count: int) -> str:
    """A text whose neighbouring lines with an @ are repeated `count` times, with 0, 1, 2, ... for it.

    MLX looks for the names of inputs in the text, so that it has to have them in full.
    """
    parts = []
    for is_repeated, lines in groupby(text.splitlines(keepends=True), lambda line: "@" in line):
        part = "".join(lines)
        parts += [part.replace("@", str(number)) for number in range(count)] if is_repeated else [part]
    return "".join(parts)


def _read(name: str) -> str:
    assert __package__
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
