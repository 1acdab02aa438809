"""State diagrams of the client's connection and requests, drawn from the tables in its code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from zmqengine_client.core.phases import CONNECTION, REQUEST, EventT, Phase, PhaseT, RequestPhase

PAGE = "docs/client.md"


def parts() -> dict[str, str]:
    """The diagrams by the names of their parts of the page."""
    return {
        "connection": _drawing(CONNECTION, Phase.IDLE),
        "request": _drawing(REQUEST, RequestPhase.WAITING),
    }


def _drawing(table: Mapping[PhaseT, Mapping[EventT, PhaseT]], first: PhaseT) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_id(first)}"]
    lines += [f'    state "{phase.value}" as {_id(phase)}' for phase in table if " " in phase.value]
    for phase, ways in table.items():
        for event, after in ways.items():
            lines.append(f"    {_id(phase)} --> {_id(after)}: {event.value}")
        if not ways:
            lines.append(f"    {_id(phase)} --> [*]")
    return "\n".join([*lines, "```", ""])


def _id(phase: Enum) -> str:
    return str(phase.value).replace(" ", "_")
