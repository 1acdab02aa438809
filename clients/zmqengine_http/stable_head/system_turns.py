"""System messages within a conversation.

Agents add them as they go: a plan, a date, a list of skills. Most templates know one system message, the first; moved
there, each new one would change the head of the prompt. So they stay where they stand, as user turns that say what
they are, in the words that Claude Code itself uses.
"""

from __future__ import annotations

from collections.abc import Sequence

_SYSTEM = ("system", "developer")
_OPEN, _CLOSE = "<system-reminder>", "</system-reminder>"


def with_one_system_message(messages: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], int]:
    """The messages with the leading system messages as one, and later ones as user turns; how many those were.

    A system message that stands between calls and their results comes after the results.
    """
    head = 0
    while head < len(messages) and messages[head]["role"] in _SYSTEM:
        head += 1
    kept = _as_one(messages[:head])
    held: list[dict[str, object]] = []
    unanswered = turns = 0
    for message in messages[head:]:
        role = message["role"]
        if role in _SYSTEM:
            turns += 1
            (held if unanswered else kept).append(_marked(message))
            continue
        if role == "tool":
            unanswered = max(unanswered - 1, 0)
            kept.append(message)
        else:
            kept += held
            held = []
            calls = message.get("tool_calls")
            unanswered = len(calls) if isinstance(calls, list) else 0
            kept.append(message)
        if not unanswered:
            kept += held
            held = []
    return kept + held, turns


def _as_one(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    if len(messages) < 2:
        return list(messages)
    texts = [str(message.get("content") or "") for message in messages]
    return [{**messages[0], "content": "\n\n".join(text for text in texts if text)}]


def _marked(message: dict[str, object]) -> dict[str, object]:
    text = str(message.get("content") or "").strip()
    if not text.startswith(_OPEN):
        text = f"{_OPEN}\n{text}\n{_CLOSE}"
    return {"role": "user", "content": text}
