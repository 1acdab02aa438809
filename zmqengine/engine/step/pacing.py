"""The size of prefill chunks, so that a step of the engine is bounded in time and not only in tokens."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

TOKENS_MIN = 32
"""A smaller chunk costs more than it saves."""
TOKENS_START = 256
"""Tokens of a prefill chunk at the start: a few chat messages, on any machine."""

# Least time target beside decoding rows, whatever little a decode step of theirs takes.
_GOAL_S_MIN = 0.025
# Decode steps that a chunk may take while few rows wait, if there is time for `TOKENS_START`.
_DECODE_STEPS_MIN = 2
# Factor of the time target where every delayed row waits for the chunk itself, and where some that decode wait as well.
_IDLE_SHARE, _BESIDE_SHARE = 2.5, 1.5
# This many rows that wait while none decodes are a burst.
_BUNCH_ROWS = 16
# Steps after its launch in which the time of a chunk may show, depending on the device.
_LATE_STEPS = 2
# Weight of earlier steps in the moving average of the prefill speed: about five steps count.
_KEPT = 0.8
# A step longer than this multiple of its expected time was delayed by the system, not by its chunk.
_HELD_UP = 3.0
# Least speed assumed, as a share of the speed measured at the start: short chunks take the time of one model call, so
# shorter ones gain nothing.
_SLOWEST_SHARE = 0.25


class Bounds(NamedTuple):
    """Bounds of the time that prefill adds to a step.

    `decode_steps`: in steps without prefill; more hardly speeds prompts up and delays streams. `idle_share`: factor
    where every delayed row waits for prefill. `bunch_chunks`: largest chunks that a burst may prefill at once.
    """

    decode_steps: float
    idle_share: float
    bunch_chunks: int


_USUAL = Bounds(8, _IDLE_SHARE, 1)
# Streams stall for the chunk and while the host starts the next one. A burst that is prefilled in parts stays in parts:
# its first rows stall in every step while the others are prefilled.
_ON_GPU = Bounds(6, 4, 2)


class StepPace:
    """A chunk size that follows the measured speed of prefill.

    Prefill may add `target_s` to the time of a step without it, and on a fast machine the time of eight such steps,
    on a `gpu` of six. While few rows wait, two steps are enough where they have time for `TOKENS_START`: longer chunks
    are hardly faster by the token, and streams pause for them. The more rows wait than decode, the more prefill may
    add, up to half as much again, two and a half times as much where none decodes, and on a fast GPU four times the
    steps. A target of 0 always allows the largest chunk. A chunk has `TOKENS_MIN` to `tokens_max` tokens, or while no
    row decodes `idle_tokens_max`, on a GPU twice that for a burst. It is never more than twice as long as one that was
    timed: the speed of prefill differs by orders of magnitude between machines and models, and is not known before.

    The speed, and not the last step, decides: a machine with other work has slow steps all the time, and a pace that
    each of them shortens ends at chunks that cost twice as much a token.
    """

    def __init__(self, tokens_max: int, idle_tokens_max: int, target_s: float, *, gpu: bool = False) -> None:
        self.tokens_max = tokens_max
        self._idle_tokens_max = max(tokens_max, idle_tokens_max)
        self.target_s = target_s
        """Seconds that prefill may add to a step; 0 for no limit."""
        self.decoding_elsewhere = 0
        """Rows that decode in other processes on this device; they wait for a chunk as those of this engine do."""
        self._bounds = _ON_GPU if gpu else _USUAL
        self._shows_late = gpu
        self.begin(None)

    def begin(self, measured: tuple[float, float] | None) -> None:
        """Start again from a measured (tokens per second of prefill, seconds of a step without it), or from nothing."""
        self._decoding = 0
        self._launched = deque([0] * _LATE_STEPS, maxlen=_LATE_STEPS)
        self._read_tokens = 0.0
        # Lower and upper estimate of the seconds that prefill took.
        self._read_s = [0.0, 0.0]
        # Tokens of chunks, and the seconds that they added to their own steps, where these show it.
        self._chunk_tokens = self._chunk_s = 0.0
        # Seconds of steps without prefill, by the number of rows, rounded to its bit length.
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
        """The largest chunk that the next step may have."""
        waiting = [_BUNCH_ROWS, *(1 << size - 1 for size in self._plain_s)]
        return max(self._tokens(1, 1), *(self._tokens(0, rows) for rows in waiting))

    def choose(self, *, decoding: int, waiting: int) -> int:
        """Tokens of this step's chunk, while `decoding` rows decode and `waiting` rows wait for prefill."""
        self._decoding = decoding
        return self._tokens(decoding + self.decoding_elsewhere, waiting)

    def goal_s(self, decoding: int, waiting: int) -> float:
        """Seconds of this step for other work in the place of a chunk, the time of that chunk; 0 is for no limit.

        On a CPU prompts take longer than their chunks do: the step in which a row joins the batch copies it. The speed
        counts both, so the time of chunks is measured by itself.
        """
        if not self.target_s:
            return 0.0
        decoding += self.decoding_elsewhere
        goal_s = self._goal_s(decoding, waiting)
        if self._speed is None:
            return goal_s
        most = self.tokens_max if decoding else self._most_idle(waiting)
        tokens = min(max(self._speed, self._slowest) * goal_s, most)
        token_s = self._chunk_s / self._chunk_tokens if self._chunk_s else 1 / self._speed
        return min(goal_s, tokens * token_s)

    @property
    def tokens_per_s(self) -> float:
        """The speed of prefill; 0 if none was timed."""
        return self._speed or 0.0

    @property
    def plain_s(self) -> float:
        """Seconds of a step of as many rows as decode now without prefill; 0 if none was timed."""
        return self._plain_s[self._nearest_seen(self._decoding)] if self._plain_s else 0.0

    def record(self, tokens_read: int, seconds: float, *, decoded: bool = True) -> None:
        """Learn from a step that took `seconds` and launched `tokens_read` tokens of prefill.

        Unless it `decoded`, it launched no decode step and says nothing about the time of one.
        """
        if not self.target_s:
            return
        launched = self._launched[0]
        self._launched.append(tokens_read)
        recent = [launched, *self._launched]
        # The chunk's time shows in one of these steps: at once on a CPU, later on a GPU.
        of_these = sum(recent) / len(recent)
        if not any(recent):
            if decoded:
                self._record_plain(seconds)
            return
        least_s, most_s = self._plain_step_range_s(self._decoding)
        goal_s = self._goal_s(self._decoding)
        usual = self._tokens(max(1, self._decoding), 1)
        if seconds - least_s <= goal_s and any(0 < tokens * 2 < usual for tokens in recent):
            # A short prompt takes the time of one model call, and says nothing about long ones.
            return
        held_up_s = inf if self._speed is None else _HELD_UP * max(of_these / self._speed, goal_s)
        self._read_tokens = self._read_tokens * _KEPT + of_these
        added_s = [min(max(0.0, seconds - plain_s), held_up_s) for plain_s in (most_s, least_s)]
        self._read_s = [kept * _KEPT + added for kept, added in zip(self._read_s, added_s, strict=True)]
        self._speed = self._seen_speed()
        if tokens_read and not self._shows_late:
            self._chunk_tokens = self._chunk_tokens * _KEPT + tokens_read
            self._chunk_s = self._chunk_s * _KEPT + added_s[1]
        self._room = max(self._room, 2 * launched)

    def _seen_speed(self) -> float | None:
        """The earlier speed, moved into the range that the steps allow: the rows' share of their time is not known."""
        fewest_s, most_s = self._read_s
        if not self._read_tokens or not most_s:
            return self._speed
        slowest = self._read_tokens / most_s
        if self._speed is None or self._speed < slowest:
            return slowest
        return min(self._speed, self._read_tokens / fewest_s) if fewest_s else self._speed

    def _tokens(self, decoding: int, waiting: int) -> int:
        most = self.tokens_max if decoding else self._most_idle(waiting)
        if not self.target_s:
            return most
        if self._speed is None:
            return min(TOKENS_START, most)
        # A long chunk delays decoding rows, a short one waiting rows.
        within = int(max(self._speed, self._slowest) * self._goal_s(decoding, waiting))
        return max(min(TOKENS_MIN, most), min(within, most, self._room))

    def _most_idle(self, waiting: int) -> int:
        return self._idle_tokens_max * (self._bounds.bunch_chunks if waiting >= _BUNCH_ROWS else 1)

    def _goal_s(self, decoding: int, waiting: int = 0) -> float:
        """Seconds that prefill may add to a step of `decoding` rows while `waiting` rows wait."""
        ahead = _ahead(decoding, waiting)
        target_s = self.target_s * (1 + ((_BESIDE_SHARE if decoding else _IDLE_SHARE) - 1) * ahead)
        if not self._plain_s:
            return target_s
        # While no row decodes, the steps to come are those of the rows that wait.
        near_s = self._plain_s[self._nearest_seen(decoding or waiting)]
        most_s = max(_GOAL_S_MIN, self._bounds.decode_steps * near_s)
        least_s = most_s
        if self._speed and decoding:
            least_s = min(most_s, max(_DECODE_STEPS_MIN * near_s, TOKENS_START / self._speed))
        most_s *= 1 + (self._bounds.idle_share - 1) * ahead
        return min(target_s, least_s + (most_s - least_s) * ahead)

    def _record_plain(self, seconds: float) -> None:
        if self._decoding:
            size = self._decoding.bit_length()
            self._plain_s[size] = 0.8 * self._plain_s.get(size, seconds) + 0.2 * seconds

    def _plain_step_range_s(self, decoding: int) -> tuple[float, float]:
        """Bounds of the seconds of a step of `decoding` rows without prefill; 0 if none was timed.

        From steps of other numbers of rows: more rows take no less, and no more a row.
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


def _ahead(decoding: int, waiting: int) -> float:
    """The excess of waiting over decoding rows, as a share."""
    return max(0, waiting - decoding) / max(1, waiting + decoding)
