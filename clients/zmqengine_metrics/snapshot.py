"""What is known of one worker at one moment."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine.protocol.messages import Description, Histogram, Status


class Snapshot(NamedTuple):
    """A worker's answers, or None for each that it did not give."""

    worker: str
    description: Description | None = None
    status: Status | None = None
    model_before: str = ""
    """The model it had when it was last heard: its series are to go on under the same labels while it is silent."""

    @property
    def model(self) -> str:
        """The name of its model; empty while none was ever known."""
        known = self.description.model if self.description is not None else None
        return known.name if known is not None else self.model_before

    def number(self, name: str) -> float | None:
        """A number of its status, if it tells that one."""
        return self.status.numbers.get(name) if self.status is not None else None

    def histogram(self, name: str) -> Histogram | None:
        """A histogram of its status, if it tells that one."""
        return self.status.histograms.get(name) if self.status is not None else None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by part, `limit` left out."""
        parts = self.status.memory if self.status is not None else {}
        return {part: size for part, size in parts.items() if part != "limit"}

    @property
    def memory_limit(self) -> int | None:
        """Bytes that all parts together may come to."""
        return self.status.memory.get("limit") if self.status is not None else None

    @property
    def ended(self) -> dict[str, float]:
        """Requests that ended, by how."""
        numbers = self.status.numbers if self.status is not None else {}
        return {
            name.removeprefix("ended_"): value for name, value in numbers.items() if name.startswith("ended_")
        }
