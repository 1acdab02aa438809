"""Requests as agents send them: the shapes, sizes and orders of captured ones, with invented texts."""

from __future__ import annotations

import json
import random
from typing import Any

_SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
TOOLS = 23


_choose = random.Random(0)
_WORDS = ["".join(_choose.choices(_SYLLABLES, k=_choose.randint(1, 4))) for _ in range(2000)]


def words(choose: random.Random, chars: int) -> str:
    """Prose of that many characters, in which some words are common and most are rare."""
    parts: list[str] = []
    length = 0
    while length < chars:
        word = _WORDS[int(2000 * choose.random() ** 3)]
        parts.append(word + choose.choice(["", "", "", ".", ",", "\n"]))
        length += len(parts[-1]) + 1
    return " ".join(parts)[:chars]


def claude_tools(chars: int = 80_000) -> list[dict[str, Any]]:
    """Claude Code's: long descriptions, schemas of a few properties each; fewer tools if they are to be short."""
    choose = random.Random(1)
    tools = []
    count = TOOLS if chars > 10_000 else 5
    for place in range(count):
        properties = {
            f"field_{number}": {
                "description": words(choose, 120),
                "type": choose.choice(["string", "number"]),
            }
            for number in range(choose.randint(1, 5))
        }
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": list(properties)[:1],
            "additionalProperties": False,
        }
        description = words(choose, max(60, chars // count - len(json.dumps(schema))))
        tools.append({"name": f"Tool{place}", "description": description, "input_schema": schema})
    return tools


def claude_system(turn: int, *, chars: int = 15_000) -> list[dict[str, Any]]:
    """The billing line, another with each request; two cached blocks; the tokens left."""
    choose = random.Random(2)
    mark = {"type": "ephemeral"}
    return [
        {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1.233.{turn:03x}; cch={turn * 7919:05x};",
        },
        {"type": "text", "text": words(choose, 60), "cache_control": mark},
        {"type": "text", "text": words(choose, chars), "cache_control": mark},
        {"type": "text", "text": f"<total_tokens>{200_000 - 1000 * turn:08d} tokens left</total_tokens>"},
    ]


def claude_request(
    messages: list[dict[str, Any]], turn: int = 1, *, size: int = 100_000, **fields: Any
) -> dict[str, Any]:
    """The body of a turn, of about `size` bytes before its messages."""
    return {
        "model": "claude-sonnet-4-6",
        "max_tokens": 32_000,
        "stream": True,
        "system": claude_system(turn, chars=size * 15 // 100),
        "tools": claude_tools(size * 80 // 100),
        "messages": messages,
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **fields,
    }


def codex_request(items: list[dict[str, Any]], *, size: int = 20_000, **fields: Any) -> dict[str, Any]:
    """The body of a turn of Codex: instructions, functions, a namespace, a freeform tool and hosted ones."""
    choose = random.Random(3)
    functions = [
        {
            "type": "function",
            "name": f"tool_{place}",
            "description": words(choose, size // 60),
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"field_0": {"type": "string", "description": words(choose, size // 250)}},
                "required": ["field_0"],
                "additionalProperties": False,
            },
        }
        for place in range(12)
    ]
    return {
        "model": "gpt-5.5-codex",
        "instructions": words(choose, size // 5),
        "input": items,
        "tools": [
            *functions[:8],
            {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": functions[8:]},
            {"type": "custom", "name": "apply_patch", "description": words(choose, 200),
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1fe6d-0000-7000-8000-000000000000",
        "client_metadata": {"x-codex-installation-id": "i"},
        "text": {"verbosity": "medium"},
        **fields,
    }  # fmt: skip
