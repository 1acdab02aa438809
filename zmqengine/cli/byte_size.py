"""A number of bytes as people type it."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(i?b)?\Z", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def byte_size(value: str | int) -> int:
    """Bytes of `1048576`, `512M`, `2G` or `1.5GiB`, in units of 1024. For `type=` of an option."""
    match = _SIZE.match(str(value).strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size: write it like 512M or 2G")
    return int(float(match["number"]) * _FACTORS[match["unit"].lower()])


def shown(size: int) -> str:
    """The shortest way to write it that `byte_size` reads back, at most 1/20 off."""
    for unit in "TGMK":
        factor = _FACTORS[unit.lower()]
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return str(size)
