"""A number of bytes as people type it."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(i?b)?\Z", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType[int]):
    """`1048576`, `512M`, `2G`, `1.5GiB`: units of 1024."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        match = _SIZE.match(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no size: write 512M or 2G", param, ctx)
        return int(float(match["number"]) * _FACTORS[match["unit"].lower()])


def shown(size: int) -> str:
    """The shortest way to write it that `ByteSize` reads back, at most 1/20 off."""
    for unit in "TGMK":
        factor = _FACTORS[unit.lower()]
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return str(size)
