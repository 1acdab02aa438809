"""How many tokens a request took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Usage:
    """Counts over all choices; a prompt counts once, however many choices it has.

    `completion` holds every token the model made, reasoning and end tokens too.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
