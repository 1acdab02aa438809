"""The list of models as Codex reads it: `{"models": [...]}`, in which one missing field voids the list.

Source: codex-rs/protocol, `ModelInfo`.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqengine_http.workers.worker import Model

_INSTRUCTIONS = (
    "You are a coding agent that runs in a terminal on the user's computer. You read and change files and run "
    "commands with the tools you are given. Keep going until the user's task is done, check what you changed, and "
    "then say briefly what you did. Do not invent the contents of files or the output of commands: look."
)


def codex_models(models: Iterable[tuple[str, Model]]) -> dict[str, object]:
    """One entry a name."""
    return {"models": [_entry(place, name, model) for place, (name, model) in enumerate(models)]}


def _entry(place: int, name: str, model: Model) -> dict[str, object]:
    return {
        "slug": name,
        "display_name": name,
        "description": f"{model.card.name}, served by zmqengine",
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": bool(model.markers.think_end or model.markers.harmony),
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": model.card.context_tokens,
        "experimental_supported_tools": [],
    }
