"""What was chosen for this device and this model, and why."""

from __future__ import annotations


class Choices:
    """By what was to be chosen, the choice in words. One of each model that is loaded."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def note(self, what: str, choice: str) -> None:
        """Remember a choice; the last one about the same thing counts."""
        self._made[what] = choice

    def as_facts(self) -> dict[str, str]:
        """For the log, `status` and `doctor`."""
        return dict(self._made)
