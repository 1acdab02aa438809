"""SPEC.md as data: its examples, its tables and the paragraph of each message."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import zmqengine.protocol
from zmqengine.protocol import launcher, messages
from zmqengine.protocol.messages import Message

TEXT = (Path(zmqengine.protocol.__file__).parent / "SPEC.md").read_text(encoding="utf-8")

UNIONS = {
    "command": messages.Command,
    "command_reply": messages.CommandReply,
    "output": messages.Output,
    "control": messages.ControlRequest,
    "control_reply": messages.ControlReply,
    "launcher": launcher.LauncherRequest,
    "launcher_reply": launcher.LauncherReply,
}
KINDS = {cls.KIND.decode(): cls for union in UNIONS.values() for cls in get_args(union)}


def examples() -> list[tuple[str, dict[str, Any]]]:
    """Kind and body of every example block, in the page's order."""
    blocks = re.findall(r"```python\n# (\w)\n(.*?)```", TEXT, flags=re.DOTALL)
    return [(kind, ast.literal_eval(body)) for kind, body in blocks]


def table(first_header: str, after: str = "") -> list[list[str]]:
    """The rows, header left out, of the first table after `after` whose first column is `first_header`."""
    text = TEXT[TEXT.index(after) :]
    match = re.search(
        rf"^\| {re.escape(first_header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE
    )
    assert match, f"SPEC.md has no table of {first_header!r} after {after!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in match[1].splitlines()]


def paragraphs(kind: str) -> str:
    """The blocks of text that name the type byte in backticks, each with the one that follows."""
    text = re.sub(r"```python\n.*?```\n", "", TEXT, flags=re.DOTALL)
    blocks = text.split("\n\n")
    named = [index for index, block in enumerate(blocks) if f"`{kind}`" in block]
    return "\n".join(block for index in named for block in blocks[index : index + 2])


def message_classes() -> list[type[Message]]:
    """Every message of messages.py that goes over a socket, each once."""
    return list(KINDS.values())
