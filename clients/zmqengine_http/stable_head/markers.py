"""Two markers that agents put into their system prompts and change with every request.

Claude Code begins its system prompt with a line of its own accounts, `x-anthropic-billing-header: cc_version=...;`, and
since 2.1.233 tells the model after every tool result how much of the context is left, `<total_tokens>12345 tokens
left</total_tokens>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_COUNTDOWN = re.compile(r"[ \t]*<total_tokens>[^<]{0,80}</total_tokens>[ \t]*\n?")
_ONLY_COUNTDOWN = re.compile(
    r"\s*(?:<system-reminder>)?\s*<total_tokens>[^<]{0,80}</total_tokens>\s*(?:</system-reminder>)?\s*"
)
_SYSTEM = ("system", "developer")


def without_markers(messages: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], int, int]:
    """The messages without either marker, and how many of each there were.

    System messages lose them wherever they stand, and go if nothing is left. Of what users say only a message that is
    nothing but a countdown goes: they may speak of one.
    """
    kept: list[dict[str, object]] = []
    billing_lines = countdowns = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            kept.append(message)
        elif message["role"] in _SYSTEM:
            text, billed = _BILLING.subn("", content)
            text, counted = _COUNTDOWN.subn("", text)
            billing_lines += billed
            countdowns += counted
            if not (billed or counted):
                kept.append(message)
            elif text.strip():
                kept.append({**message, "content": text})
        elif message["role"] == "user" and "<total_tokens>" in content and _ONLY_COUNTDOWN.fullmatch(content):
            countdowns += 1
        else:
            kept.append(message)
    return kept, billing_lines, countdowns
