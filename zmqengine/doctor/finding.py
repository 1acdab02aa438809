"""One line of a report."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """What was found and, unless all is well, what to do about it."""

    level: Level
    subject: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.text}: {self.advice}" if self.advice else self.text
