"""How long a batch that is about to begin waits for more requests: those that are read together wait for one step.

Where prompts are short, a step that reads one of them costs nearly what it costs for all, and whoever comes during it
waits for it. Requests come in bunches, whose messages are some milliseconds apart, and those who were answered together
ask again together: a bunch that was read in parts once would stay in parts.
"""

from __future__ import annotations

LOOK_S = 0.0003
"""Between two looks. As long does one that comes alone to an idle worker wait for others."""
WAIT_S_MAX = 0.005
STEP_SHARE = 0.5
"""Of a step of decoding: where steps are short, waiting gains little."""
AGAIN_S = 0.05
"""Seconds after an answer within which the next request comes from a program, not from a reader."""


class BatchingDelay:
    """Says how often to look for more, and whether to go on looking. Reads no clock."""

    def __init__(self) -> None:
        self._ended = 0
        self._emptied_s = 0.0

    def emptied(self, ended: int, now_s: float) -> None:
        """A step ended the last rows, so many of them at once."""
        self._ended, self._emptied_s = ended, now_s

    def looks_max(self, step_s: float | None) -> int:
        """How many looks are worth it where a step of decoding takes so long; None if that is not known yet."""
        return 0 if step_s is None else int(min(WAIT_S_MAX, STEP_SHARE * step_s) / LOOK_S)

    def expects_more(self, waiting: int, came: int, now_s: float) -> bool:
        """Whether others are likely to come within moments: so many wait, some of whom came since the last look."""
        again = self._ended if now_s - self._emptied_s <= AGAIN_S else 0
        return waiting < again or (came > 0 and waiting > max(1, again))
