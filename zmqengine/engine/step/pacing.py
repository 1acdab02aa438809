"""How much prompt one step may read, so that a step is bounded in time and not only in tokens."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from zmqengine.engine.load import prompt_sizes

TOKENS_MIN = 32
"""A smaller chunk costs more than it saves."""
TOKENS_START = 256
"""Tokens of a prefill chunk at the start: a few chat messages, on any machine."""

_GOAL_S_MIN = 0.025
# As many times as much, where all who are held up by it wait for what it reads.
_IDLE_SHARE = 2.5
# From so many rows on that wait while none decodes, they are a bunch.
_BUNCH_ROWS = 16
# The time of a chunk is seen in the step that launches it or up to so many steps later: it depends on the device.
_LATE_STEPS = 2
# Of what was seen before, so much counts still when another step is seen: some five steps tell the speed.
_KEPT = 0.8
# A step that took more than so many times what was to be expected was held up by the system, not by what it read.
_HELD_UP = 3.0
# Of the speed that was measured at the start. Where most of a short chunk's time is the model itself, shorter ones gain
# nothing.
_SLOWEST_SHARE = 0.25


class Bounds(NamedTuple):
    """What reading may add to a step, in steps without it: more makes prompts hardly faster and streams silent for
    longer. As many times as much where all who are held up by it wait for what it reads; and so many of the largest
    chunks for a bunch."""

    decode_steps: float
    idle_share: float
    bunch_chunks: int


_USUAL = Bounds(8, _IDLE_SHARE, 1)
# Streams are silent for the chunk and while the host starts the next one. A bunch that is read in parts stays in parts:
# each time those who come first are silent while the others are read.
_ON_GPU = Bounds(6, 4, 2)


class StepPace:
    """A chunk size that follows the speed at which prompts are read, as seen in the time that steps take.

    Reading may add `target_s` to what a step without it takes, and on a fast machine as much as eight such steps, on a
    GPU six: that is `even`, which also makes chunks of few sizes. It may add up to two and a half times as much the
    more rows wait to be read than decode, on a fast GPU four times. A target of 0 always allows the most. A chunk is
    between `TOKENS_MIN` and `tokens_max`, or while no row decodes `idle_tokens_max`, on a GPU twice that for many rows.
    It is never more than twice as long as one that was seen: how fast a machine reads a model's prompts differs by
    orders of magnitude, and is not known before.

    The speed, and not the last step, decides: a machine with other work has slow steps all the time, and a pace that
    every one of them shortens ends at chunks that cost twice as much a token.
    """

    def __init__(self, tokens_max: int, idle_tokens_max: int, target_s: float, *, even: bool = False) -> None:
        self.tokens_max = tokens_max
        self._idle_tokens_max = max(tokens_max, idle_tokens_max)
        self._target_s = target_s
        self._even = even
        self._bounds = _ON_GPU if even else _USUAL
        self.begin(None)

    def begin(self, measured: tuple[float, float] | None) -> None:
        """Start again, with the speed of reading and what a step without it takes, if they were measured."""
        self._decoding = 0
        self._launched = deque([0] * _LATE_STEPS, maxlen=_LATE_STEPS)
        self._read_tokens = 0.0
        # At the least and at the most.
        self._read_s = [0.0, 0.0]
        # Of steps that read nothing, by the number of rows: of as many bits each.
        self._plain_s: dict[int, float] = {}
        self._speed: float | None = None
        self._slowest = 0.0
        self._room = TOKENS_START
        if measured is not None:
            self._speed, self._plain_s[1] = measured
            self._slowest = self._speed * _SLOWEST_SHARE
            self._room = self._idle_tokens_max * self._bounds.bunch_chunks

    def shrink(self) -> int:
        """Halve the most tokens of a chunk and return it. Below `TOKENS_START` time decides alone."""
        bunch = self._bounds.bunch_chunks
        self._bounds = self._bounds._replace(bunch_chunks=1)
        if bunch == 1:
            self._idle_tokens_max = max(min(TOKENS_START, self._idle_tokens_max), self._idle_tokens_max // 2)
            self.tokens_max = min(self.tokens_max, self._idle_tokens_max)
        return self._idle_tokens_max

    @property
    def largest_tokens(self) -> int:
        """The most that the next step may read, whoever waits."""
        return max(self._tokens(1, 1), self._tokens(0, _BUNCH_ROWS))

    def choose(self, *, decoding: int, waiting: int) -> int:
        """How many tokens this step may read, while so many rows decode and so many have a prompt to be read."""
        self._decoding = decoding
        tokens = self._tokens(decoding, waiting)
        if not self._even:
            return tokens
        return tokens - tokens % prompt_sizes.WHOLE or prompt_sizes.at_most(tokens)

    def record(self, tokens_read: int, seconds: float) -> None:
        """The step took so long in all, and launched the reading of `tokens_read` tokens of prompt."""
        if not self._target_s:
            return
        launched = self._launched[0]
        self._launched.append(tokens_read)
        recent = [launched, *self._launched]
        # Its time is seen in one of these steps: at once on a CPU, later on a GPU.
        of_these = sum(recent) / len(recent)
        if not any(recent):
            self._record_plain(seconds)
            return
        least_s, most_s = self._plain_step_range_s(self._decoding)
        goal_s = self._goal_s(self._decoding)
        usual = self._tokens(max(1, self._decoding), 1)
        if seconds - least_s <= goal_s and any(0 < tokens * 2 < usual for tokens in recent):
            # A short prompt is mostly the model itself, and says nothing about long ones.
            return
        held_up_s = inf if self._speed is None else _HELD_UP * max(of_these / self._speed, goal_s)
        self._read_tokens = self._read_tokens * _KEPT + of_these
        added_s = (min(max(0.0, seconds - plain_s), held_up_s) for plain_s in (most_s, least_s))
        self._read_s = [kept * _KEPT + added for kept, added in zip(self._read_s, added_s, strict=True)]
        self._speed = self._seen_speed()
        self._room = max(self._room, 2 * launched)

    def _seen_speed(self) -> float | None:
        """The speed as it was, or what is next to it of what the steps allow: what the rows took may not be known."""
        fewest_s, most_s = self._read_s
        if not self._read_tokens or not most_s:
            return self._speed
        slowest = self._read_tokens / most_s
        if self._speed is None or self._speed < slowest:
            return slowest
        return min(self._speed, self._read_tokens / fewest_s) if fewest_s else self._speed

    def _tokens(self, decoding: int, waiting: int) -> int:
        most = self.tokens_max if decoding else self._idle_tokens_max
        if not decoding and waiting >= _BUNCH_ROWS:
            most *= self._bounds.bunch_chunks
        if not self._target_s:
            return most
        if self._speed is None:
            return min(TOKENS_START, most)
        # Those who decode are held up by a long chunk, and those who wait by a short one.
        ahead = max(0, waiting - decoding) / max(1, waiting + decoding)
        within = int(max(self._speed, self._slowest) * self._goal_s(decoding, ahead))
        return max(min(TOKENS_MIN, most), min(within, most, self._room))

    def _goal_s(self, decoding: int, ahead: float = 0.0) -> float:
        """What reading may add to a step of so many rows, where so many more wait than decode, as a share of all."""
        target_s = self._target_s * (1 + (_IDLE_SHARE - 1) * ahead)
        if not self._plain_s:
            return target_s
        near_s = self._plain_s[self._nearest_seen(decoding)]
        steps_s = max(_GOAL_S_MIN, self._bounds.decode_steps * near_s)
        return min(target_s, steps_s * (1 + (self._bounds.idle_share - 1) * ahead))

    def _record_plain(self, seconds: float) -> None:
        if self._decoding:
            size = self._decoding.bit_length()
            self._plain_s[size] = 0.8 * self._plain_s.get(size, seconds) + 0.2 * seconds

    def _plain_step_range_s(self, decoding: int) -> tuple[float, float]:
        """The least and the most that a step of so many rows takes that reads nothing; 0 if none was seen.

        Where such steps were seen only of other numbers of rows: more rows take no less, and no more a row.
        """
        if not self._plain_s:
            return 0.0, 0.0
        seen = self._nearest_seen(decoding)
        seen_s = self._plain_s[seen]
        in_proportion_s = seen_s * 2.0 ** (max(1, decoding).bit_length() - seen)
        return min(seen_s, in_proportion_s), max(seen_s, in_proportion_s)

    def _nearest_seen(self, decoding: int) -> int:
        size = max(1, decoding).bit_length()
        return min(self._plain_s, key=lambda seen: (abs(seen - size), seen))
