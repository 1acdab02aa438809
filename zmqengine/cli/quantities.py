"""Byte sizes, durations and counts, as users type and read them."""

from __future__ import annotations

import math
from typing import Any

import click

from zmqengine.errors import ConfigError
from zmqengine.option import DAY_S, size_of

_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Seconds(click.FloatRange):
    """Type of an option that is a time: from `least` to `most` seconds, never NaN."""

    def __init__(self, least: float, most: float = DAY_S) -> None:
        super().__init__(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds. Raises `BadParameter`."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            # The range lets it pass: no comparison with NaN holds.
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return float(seconds)


def byte_size(value: str | int) -> int:
    """Bytes of `1048576`, `512M`, `2G` or `1.5GiB`, in units of 1024. For `type=` of an option."""
    try:
        return size_of(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def shown(size: int) -> str:
    """A short form such as `1.5G` that `byte_size` reads back, at most 1/20 off."""
    for unit in "TGMK":
        factor = _FACTORS[unit]
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return str(size)


def duration(seconds: float) -> str:
    """`2 d 3 h`: the two largest units that are not zero."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    return " ".join([f"{number} {unit}" for number, unit in parts if number][:2]) or "0 s"


def count(number: int, one: str, many: str = "") -> str:
    """`1 request`, `2 requests`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def memory_line(parts: dict[str, int]) -> str:
    """`1.2G of 8G (15%): weights 1G, kv 200M`, from the memory parts of a status; the largest first."""
    limit = parts.get("limit", 0)
    held = sorted(((size, part) for part, size in parts.items() if part != "limit" and size), reverse=True)
    total = sum(size for size, _ in held)
    share = f" of {shown(limit)} ({total / limit:.0%})" if limit else ""
    named = ", ".join(f"{part.replace('_', ' ')} {shown(size)}" for size, part in held)
    return f"{shown(total)}{share}{': ' if named else ''}{named}"
