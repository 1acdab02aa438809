"""Durations, counts and bytes as people read them."""

from __future__ import annotations

from zmqengine.cli.byte_size import shown

__all__ = ["count", "duration", "memory_line", "shown"]


def duration(seconds: float) -> str:
    """`2 d 3 h`: the two largest units that count."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    return " ".join([f"{number} {unit}" for number, unit in parts if number][:2]) or "0 s"


def count(number: int, one: str, many: str = "") -> str:
    """`1 request`, `2 requests`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def memory_line(parts: dict[str, int]) -> str:
    """`1.2G of 8G (15%): weights 1G, kv 200M`, from a status' parts; the largest first."""
    limit = parts.get("limit", 0)
    held = sorted(((size, part) for part, size in parts.items() if part != "limit" and size), reverse=True)
    total = sum(size for size, _ in held)
    share = f" of {shown(limit)} ({total / limit:.0%})" if limit else ""
    named = ", ".join(f"{part.replace('_', ' ')} {shown(size)}" for size, part in held)
    return f"{shown(total)}{share}{': ' if named else ''}{named}"
