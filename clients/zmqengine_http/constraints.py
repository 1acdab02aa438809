"""What asks for constrained output: the one place that says whether it can be had."""

from __future__ import annotations

from collections.abc import Mapping

from zmqengine_http.errors import bad_field

_REASON = "there is no constrained output yet"


def check_constraints(tool_choice: str | Mapping[str, object], response_format: Mapping[str, object]) -> None:
    """Raise a 400 for a forced tool or a format other than text. Both are in the shapes of chat completions."""
    if tool_choice not in ("none", "auto"):
        raise bad_field("tool_choice", f"a tool cannot be forced: {_REASON}", code="unsupported_value")
    kind = response_format.get("type", "text")
    if kind != "text" or response_format.keys() - {"type"}:
        raise bad_field(
            "response_format", f'only {{"type": "text"}} is supported: {_REASON}', code="unsupported_value"
        )
