"""How much prompt one step may read, so that a step is bounded in time and not only in tokens."""

from __future__ import annotations

from collections import deque

TOKENS_MIN = 32
"""A smaller chunk costs more than it saves."""
TOKENS_START = 256
"""Where a pace begins: a few chat messages, on any machine."""

FAST_STEPS = 3
"""In a row, before a chunk may grow: the first ones may only have been launched, and tell nothing."""

# What reading may add to a step, in steps without it: more makes prompts hardly faster and streams silent for longer.
_DECODE_STEPS = 8
_GOAL_S_MIN = 0.025
_IDLE_SHARE = 2.5


class PrefillPace:
    """A chunk size that follows the time steps take: down at once when one is too long, up again while there is room.

    `tokens` is between `TOKENS_MIN` and `tokens_max`. Reading prompts may add `target_s` to what a step without
    them takes, and on a fast machine as much as eight such steps; a target of 0 always allows `tokens_max`. How fast a
    machine reads a model's prompts differs by orders of magnitude, and is not known before it has been seen.
    """

    def __init__(self, tokens_max: int, target_s: float) -> None:
        self.tokens_max = tokens_max
        self._target_s = target_s
        self._decode_s: float | None = None
        self._fast_steps = 0
        self._least = min(TOKENS_MIN, tokens_max)
        self.tokens = min(TOKENS_START, tokens_max) if target_s else tokens_max

    @property
    def goal_s(self) -> float:
        """What reading may add to a step."""
        if self._decode_s is None:
            return self._target_s
        return min(self._target_s, max(_GOAL_S_MIN, _DECODE_STEPS * self._decode_s))

    def forget(self) -> None:
        """Start again with nothing known."""
        self._decode_s = None
        self._fast_steps = 0
        self._least = min(TOKENS_MIN, self.tokens_max)
        self.tokens = min(TOKENS_START, self.tokens_max) if self._target_s else self.tokens_max

    def begin(self, tokens_a_second: float, decode_s: float | None) -> None:
        """Start again with what was measured: the speed of reading, and what a step without reading takes."""
        self._decode_s = decode_s
        self._fast_steps = 0
        if self._target_s:
            within = int(tokens_a_second * self.goal_s)
            self.tokens = max(min(TOKENS_MIN, self.tokens_max), min(self.tokens_max, within))
            # Where most of a short chunk's time is the model itself, shorter ones gain nothing.
            self._least = max(min(TOKENS_MIN, self.tokens_max), self.tokens // 4)

    def record(self, tokens_read: int, seconds: float) -> None:
        """A step took so long in all, the reading of `tokens_read` tokens of prompt included."""
        if not self._target_s:
            return
        if not tokens_read:
            self._decode_s = seconds if self._decode_s is None else 0.8 * self._decode_s + 0.2 * seconds
            return
        self._follow(tokens_read, max(0.0, seconds - (self._decode_s or 0.0)))

    def _follow(self, read: int, seconds: float) -> None:
        goal_s = self.goal_s
        self._fast_steps = self._fast_steps + 1 if seconds < goal_s / 2 else 0
        if seconds > goal_s:
            # At most a halving a step: one that the system held up must not cost more than a few steps.
            shrunk = int(min(self.tokens, read) * max(0.5, goal_s / seconds))
            self.tokens = max(self._least, shrunk)
        elif self._fast_steps >= FAST_STEPS and read * 2 > self.tokens:
            self._fast_steps = 0
            self.tokens = min(self.tokens_max, self.tokens * 2)


class StepPace:
    """The pace of an engine's steps: one while rows decode, and one while none does.

    In the latter a long step holds up only those who arrive or abort, so reading may take two and a half times as long.
    """

    def __init__(self, tokens_max: int, idle_tokens_max: int, target_s: float) -> None:
        self._busy = PrefillPace(tokens_max, target_s)
        self._idle = PrefillPace(max(tokens_max, idle_tokens_max), target_s * _IDLE_SHARE)
        self._chosen = self._busy
        self._launches: deque[tuple[int, PrefillPace]] = deque(maxlen=3)

    @property
    def tokens_max(self) -> int:
        """The most that a step may ever read while rows decode."""
        return self._busy.tokens_max

    @property
    def largest_tokens(self) -> int:
        """The most that the next step may read."""
        return max(self._busy.tokens, self._idle.tokens)

    def choose(self, *, busy: bool) -> int:
        """How many tokens this step may read; `busy` if rows decode."""
        self._chosen = self._busy if busy else self._idle
        return self._chosen.tokens

    def record(self, tokens_read: int, seconds: float) -> None:
        """The step took so long in all, the reading of `tokens_read` tokens of prompt included."""
        # A chunk is waited for up to two steps after the one that launched it, or at once: it depends on the device.
        self._launches.append((tokens_read, self._chosen))
        tokens, launcher = max(self._launches, key=lambda launch: launch[0])
        launcher.record(tokens, seconds)

    def begin(self, measured: tuple[float, float] | None) -> None:
        """Start again, with the speed of reading and what a step without it takes, if they were measured."""
        self._launches.clear()
        for pace in (self._busy, self._idle):
            if measured is None:
                pace.forget()
            else:
                pace.begin(*measured)
