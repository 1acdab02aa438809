"""Findings of a launcher: its models, loaded and not loadable."""

from __future__ import annotations

from collections.abc import Iterator

from zmqengine.doctor.finding import Finding
from zmqengine.protocol.launcher import ModelList


def look_at_launcher(listed: ModelList | None) -> Iterator[Finding]:
    """Look at the models of `zmqengine serve`, if it runs."""
    if listed is None:
        return
    loaded = [entry.name for entry in listed.models if entry.state == "ready"]
    text = f"`zmqengine serve` runs with {len(listed.models)} models, loaded: {', '.join(loaded) or 'none'}"
    yield Finding("ok", "launcher", text)
    for entry in listed.models:
        if entry.state == "failed":
            yield Finding(
                "warn", "launcher", f"{entry.name} has failed ({entry.message})", "its log says why"
            )
