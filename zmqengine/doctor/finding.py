"""Findings: the lines of the diagnosis."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """A fact and, unless it is ok, advice."""

    level: Level
    subject: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """Text and advice on one line."""
        return f"{self.text}: {self.advice}" if self.advice else self.text
