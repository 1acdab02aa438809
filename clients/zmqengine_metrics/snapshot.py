"""The state of one worker at one moment."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine.protocol.messages import Description, Histogram, Status


class Snapshot(NamedTuple):
    """A worker's `describe` and `status` answers; None if it did not answer."""

    worker: str
    description: Description | None = None
    status: Status | None = None
    model_before: str = ""
    """The last known model name: the labels of the worker's series must not change while it is silent."""

    @property
    def model(self) -> str:
        """The name of the worker's model; empty until one is known."""
        known = self.description.model if self.description is not None else None
        return known.name if known is not None else self.model_before

    def number(self, name: str) -> float | None:
        """A number of the status, or None if it is not reported."""
        return self.status.numbers.get(name) if self.status is not None else None

    def histogram(self, name: str) -> Histogram | None:
        """A histogram of the status, or None if it is not reported."""
        return self.status.histograms.get(name) if self.status is not None else None

    @property
    def memory(self) -> dict[str, int]:
        """Memory in bytes by part, without `limit`."""
        parts = self.status.memory if self.status is not None else {}
        return {part: size for part, size in parts.items() if part != "limit"}

    @property
    def memory_limit(self) -> int | None:
        """The limit in bytes on the sum of all parts."""
        return self.status.memory.get("limit") if self.status is not None else None

    @property
    def ended(self) -> dict[str, float]:
        """The number of ended requests by cause."""
        numbers = self.status.numbers if self.status is not None else {}
        return {
            name.removeprefix("ended_"): value for name, value in numbers.items() if name.startswith("ended_")
        }
