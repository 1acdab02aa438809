"""The result of one check."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`ok` is None for a figure that nobody has set a bound for."""

    check: str
    ok: bool | None
    text: str
