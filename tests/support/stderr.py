"""What programs say on standard error."""

from __future__ import annotations

import re

# On a busy machine a client says so of the first text.
_SLOW = re.compile(r"(.*: )?request \w+: tokenising \d+ tokens took [\d.]+ s")


def complaints(stderr: str) -> list[str]:
    """Its lines, but for those that tell how slow the machine was."""
    return [line for line in stderr.splitlines() if not _SLOW.fullmatch(line)]
