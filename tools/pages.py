"""Pages with generated parts, each between two comments that name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def filled(path: str, parts: Mapping[str, str]) -> str:
    """The page with these parts filled in. Raises ValueError for a part without its comments."""
    page = (ROOT / path).read_text("utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}: made by `python -m tools` -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"{path} has no place for {name!r}: a line {begin!r} and a line {end!r}")
        page = f"{before}{begin}{part}{end}{after}"
    return page


def write(path: str, parts: Mapping[str, str]) -> None:
    """Fill the parts into the page."""
    (ROOT / path).write_text(filled(path, parts), encoding="utf-8")
