"""The result of one check."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`ok` is None for a figure without a bound."""

    check: str
    ok: bool | None
    text: str
    figures: dict[str, float] = {}
