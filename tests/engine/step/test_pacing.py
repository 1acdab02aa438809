"""The size of a prefill chunk follows the speed at which prompts are read."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from zmqengine.engine.step.pacing import TOKENS_MIN, TOKENS_START, StepPace
from zmqengine.engine.step.step_clock import StepClock


class Reading:
    """A machine on which one row decodes and one long prompt is read, chunk by chunk."""

    def __init__(self, pace: StepPace, tokens_a_second: float, *, step_s: float = 0.0, late: int = 2) -> None:
        self.pace, self.step_s, self.tokens_a_second = pace, step_s, tokens_a_second
        self._on_its_way = [0] * late

    def step(self, tokens: int | None = None, *, slower: float = 1.0) -> int:
        """Read a chunk, of so many tokens if told; its time is seen `late` steps later. Returns its length."""
        read = self.pace.choose(decoding=1, waiting=1)
        read = read if tokens is None else min(tokens, read)
        self._on_its_way.append(read)
        seen = self._on_its_way.pop(0)
        self.pace.record(read, (self.step_s + seen / self.tokens_a_second) * slower)
        return read

    @property
    def tokens(self) -> int:
        """How long the next chunk will be."""
        return self.pace.choose(decoding=1, waiting=1)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("tokens_a_second", [100, 1_000, 2_500, 20_000, 1_000_000])
def test_a_step_comes_to_stay_within_its_time(tokens_a_second: float, late: int) -> None:
    """lmstudio #1709, omlx #2031: one next() is bounded in time, on a machine of any speed."""
    reading = Reading(StepPace(512, 512, 0.2), tokens_a_second, late=late)
    for _ in range(30):
        reading.step()
    within = min(512, max(TOKENS_MIN, int(0.2 * tokens_a_second)))
    assert within * 0.75 <= reading.tokens <= within * 1.05


def test_one_long_step_costs_only_a_few_smaller_ones() -> None:
    """A step that the system held up makes the next ones a little shorter, and not for long."""
    reading = Reading(StepPace(2048, 2048, 0.2), 2_500)
    for _ in range(30):
        reading.step()
    usual = reading.tokens
    reading.step(slower=200)
    assert reading.tokens >= usual // 2
    for _ in range(12):
        reading.step()
    assert reading.tokens >= 0.9 * usual


def test_a_machine_with_other_work_does_not_read_in_ever_smaller_chunks() -> None:
    """Its steps take between once and four times as long, at random: chunks are what the mean of that allows."""
    reading, draw = Reading(StepPace(2048, 2048, 0.2), 2_500), random.Random(3)
    lengths = [reading.step(slower=draw.uniform(1, 4)) for _ in range(100)]
    assert min(lengths[20:]) >= 500 / 4
    assert sum(lengths[20:]) / 80 >= 500 / 2.5 * 0.75


def test_a_machine_that_becomes_slow_reads_less() -> None:
    """Within a few steps, and for good."""
    reading = Reading(StepPace(2048, 2048, 0.2), 2_500)
    for _ in range(20):
        reading.step()
    reading.tokens_a_second = 250
    for _ in range(12):
        reading.step()
    assert reading.tokens <= 2 * 50


def test_a_short_prompt_says_nothing_about_long_ones() -> None:
    """Its time is mostly the model's own, and it is no reason to read less or more of the next."""
    pace = StepPace(4096, 4096, 0.2)
    for _ in range(10):
        Reading(pace, 400).step(5)
    assert pace.choose(decoding=1, waiting=1) == TOKENS_START


def test_chunks_of_unknown_cost_grow_step_by_step() -> None:
    """No chunk is more than twice as long as one that was seen: the first ones may only have been launched."""
    reading = Reading(StepPace(4096, 4096, 0.2), 1_000_000)
    lengths = [reading.step() for _ in range(18)]
    assert all(later <= 2 * earlier for earlier, later in pairwise(lengths))
    assert lengths[-1] == 4096


def test_no_target_is_no_limit_in_time() -> None:
    """With 0 the chunk is what the option says, whatever it takes."""
    reading = Reading(StepPace(512, 2048, 0), 5)
    for _ in range(5):
        assert reading.step() == 512
    assert reading.pace.choose(decoding=0, waiting=1) == 2048


def test_the_least_chunk_is_within_the_most() -> None:
    """A maximum below the usual minimum holds."""
    reading = Reading(StepPace(8, 8, 0.2), 1)
    for _ in range(9):
        reading.step()
    assert reading.tokens == 8


def test_what_decoding_takes_is_not_held_against_the_prompts() -> None:
    """A model whose plain step is long still reads prompts in sensible chunks."""
    reading = Reading(StepPace(512, 512, 0.2), 2_000, step_s=0.5)
    for _ in range(10):
        reading.step(0)
    for _ in range(20):
        reading.step()
    assert 300 <= reading.tokens <= 410


def test_a_pace_begins_with_what_was_measured() -> None:
    """On a fast device the first chunk is already long; on one that turns out slow, streams pause for eight steps."""
    pace = StepPace(4096, 4096, 0.2)
    pace.begin((40_000, 0.005))
    reading = Reading(pace, 400)
    assert reading.tokens == 2 * 0.005 * 40_000
    for _ in range(30):
        reading.step()
    assert reading.tokens == 400
    pace.begin((1_000, 0.1))
    assert reading.tokens == 200
    pace.begin(None)
    assert reading.tokens == 256


@pytest.mark.parametrize(("gpu", "steps"), [(False, 8), (True, 6)])
def test_streams_beside_a_prompt_pause_for_a_few_steps(gpu: bool, steps: int) -> None:
    """A machine that steps in 5 ms prefills for two steps where these have time for a useful chunk, else for more."""
    for tokens_a_second, count in ((40_000, 2), (5_000, steps)):
        reading = Reading(StepPace(4096, 4096, 0.2, gpu=gpu), tokens_a_second, step_s=0.005)
        for _ in range(10):
            reading.step(0)
        for _ in range(40):
            reading.step()
        assert 0.75 * count <= reading.tokens / tokens_a_second / 0.005 <= 1.05 * count


def test_the_more_wait_beside_the_fewer_streams_the_longer_the_chunk() -> None:
    """A prompt beside as many streams takes the target, beside few half as much again, and beside none 2.5 times."""
    pace = StepPace(4096, 4096, 0.2)
    pace.begin((2_000, 1.0))
    assert pace.choose(decoding=4, waiting=1) == pace.choose(decoding=4, waiting=4) == 400
    assert 400 < pace.choose(decoding=8, waiting=24) < pace.choose(decoding=1, waiting=31) < 600
    assert pace.choose(decoding=0, waiting=1) == 1000


def test_rows_that_wait_alone_may_take_the_time_of_their_own_steps() -> None:
    """A step of one row is short on a CPU: eight prompts in parts would stay in parts, with a row more in each step."""
    pace = StepPace(2048, 2048, 0.2)
    pace.begin((2_500, 0.005))
    for rows, step_s in ((1, 0.005), (8, 0.015)):
        for _ in range(60):
            pace.choose(decoding=rows, waiting=0)
            pace.record(0, step_s)
    assert pace.choose(decoding=0, waiting=8) == pytest.approx(2.5 * 8 * 0.015 * 2_500, rel=0.05)
    assert pace.choose(decoding=0, waiting=1) == pytest.approx(2.5 * 8 * 0.005 * 2_500, rel=0.05)
    for waiting in range(1, 65):
        assert pace.choose(decoding=0, waiting=waiting) <= pace.largest_tokens


def test_a_step_that_launches_none_says_nothing_about_steps() -> None:
    """The one that only reports the last tokens of the last rows takes next to no time."""
    pace = StepPace(2048, 2048, 0.2)
    pace.begin((2_500, 0.005))
    for _ in range(60):
        pace.choose(decoding=1, waiting=0)
        pace.record(0, 0.0005, decoded=False)
    assert pace.plain_s == 0.005


def test_a_bunch_is_read_at_once_where_nobody_is_silent_for_it() -> None:
    """64 short prompts, or 63 beside one that decodes; a long one keeps nobody waiting who comes after it."""
    gpu, cpu = StepPace(2048, 2048, 0.2, gpu=True), StepPace(2048, 2048, 0.2)
    for pace in (gpu, cpu):
        pace.begin((40_000, 0.006))
        for _ in range(12):
            tokens = pace.choose(decoding=0, waiting=64)
            pace.record(tokens, 0.006 + tokens / 40_000)
    assert gpu.choose(decoding=0, waiting=64) == gpu.largest_tokens == 4096
    assert gpu.choose(decoding=1, waiting=63) == gpu.choose(decoding=0, waiting=1) == 2048
    assert gpu.choose(decoding=32, waiting=32) <= 6 * 0.006 * 40_000
    assert cpu.choose(decoding=0, waiting=64) == cpu.largest_tokens == 2048
    slow = StepPace(2048, 2048, 0.2, gpu=True)
    slow.begin((1_000, 0.1))
    assert slow.choose(decoding=0, waiting=64) <= 2.5 * 0.2 * 1_000


@pytest.mark.parametrize("tokens_max", [64, 2048])
@pytest.mark.parametrize("plain_s", [0.010, 0.060])
def test_other_work_takes_as_long_as_the_chunk_in_whose_place_it_is(plain_s: float, tokens_max: int) -> None:
    """Pieces of an image do not take the time of the steps in which rows join the batch as well."""
    pace = StepPace(tokens_max, 2048, 0.2)
    for _ in range(20):
        left, chunk_s = 600, 0.0
        while left:
            tokens = min(left, pace.choose(decoding=8, waiting=1))
            left -= tokens
            pace.record(tokens, plain_s + tokens / 6_000)
            chunk_s = max(chunk_s, tokens / 6_000)
        for seconds in (0.035, 0.0, 0.0):
            pace.choose(decoding=8, waiting=0)
            pace.record(0, plain_s + seconds)
    assert 0.85 * chunk_s <= pace.goal_s(8, 1) <= 1.05 * chunk_s


def test_a_step_on_the_cpu_takes_what_it_computes() -> None:
    """Time in which other programs had the processor is not the step's; on a device of its own all time is."""
    shared, own = StepClock(computes=True), StepClock(computes=False)
    shared.start()
    own.start()
    time.sleep(0.3)
    assert shared.seconds() < 0.25
    assert own.seconds() >= 0.3


class Serving:
    """A machine whose steps take longer the more rows decode, as a processor's do, and 32 rows in it.

    Requests of a burst come one by one at first, and a chunk's time is seen a step after it was launched.
    """

    ROWS, PROMPT, OUTPUT = 32, 63, 16

    def __init__(self, pace: StepPace, a_row_s: float) -> None:
        self.pace, self.a_row_s = pace, a_row_s
        self._reading = 0

    def burst(self, requests: int) -> int:
        """Serve so many requests that come at once; returns the number of steps."""
        steps, queued, waiting = 0, requests, 0
        left: list[int] = []
        while queued or waiting or left:
            room = 1 if not steps else self.ROWS - waiting - len(left)
            came = min(queued, room)
            queued, waiting = queued - came, waiting + came
            tokens = self.pace.choose(decoding=len(left), waiting=waiting)
            through = min(waiting, max(1, tokens // self.PROMPT))
            plain_s = 0.012 + self.a_row_s * len(left) if left else 0.0
            # A batch that takes rows in is copied.
            plain_s += 6 * self.a_row_s * len(left) if self._reading else 0.0
            seen, self._reading = self._reading, through * self.PROMPT
            self.pace.record(self._reading, plain_s + seen / 3_300)
            left = [tokens - 1 for tokens in left if tokens > 1] + [self.OUTPUT] * through
            waiting -= through
            steps += 1
        return steps


@pytest.mark.parametrize("a_row_s", [0.0, 0.0008, 0.006])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_first_burst_takes_no_more_steps_than_later_ones(a_row_s: float, before: int) -> None:
    """What many rows take is not held against the prompts read beside them, where only few rows were seen before."""
    serving = Serving(StepPace(2048, 2048, 0.2), a_row_s)
    for _ in range(4 * (before > 0)):
        serving.burst(before)
    first = serving.burst(200)
    later = [serving.burst(200) for _ in range(3)]
    assert first <= 1.05 * min(later), (first, later)


def test_what_many_rows_may_take_is_not_held_against_the_prompts() -> None:
    """One row's step is known, and steps of 24 that read take what those rows may take: not where they take more."""

    def beside_many(seconds: float) -> float:
        pace = StepPace(2048, 2048, 0.2)
        pace.begin((3_300, 0.012))
        before = pace.choose(decoding=24, waiting=8)
        for _ in range(20):
            pace.record(min(189, pace.choose(decoding=24, waiting=8)), seconds)
        return pace.choose(decoding=24, waiting=8) / before

    assert beside_many(0.012 * 12) == 1
    assert beside_many(2.0) <= 0.32


@pytest.mark.parametrize("gpu", [False, True])
def test_a_shrunk_pace_halves_its_largest_chunk_down_to_a_floor(gpu: bool) -> None:
    """A device that ran out of time or memory is given less; below the floor, time decides alone."""
    pace = StepPace(2048, 4096, 0.0, gpu=gpu)
    before = pace.largest_tokens
    sizes: list[int] = []
    while not sizes or sizes[-1] != TOKENS_START:
        pace.shrink()
        sizes.append(pace.largest_tokens)
    assert [before, *sizes] == [before >> place for place in range(len(sizes) + 1)]
    assert pace.shrink() == TOKENS_START
    assert pace.choose(decoding=1, waiting=1) == TOKENS_START
    small = StepPace(64, 64, 0.0)
    assert small.shrink() == 64


def test_rows_of_another_process_shorten_a_chunk_as_own_rows_do():
    """Two workers on one GPU: the streams of one wait for the prefill of the other."""
    alone, beside, own = (StepPace(2048, 4096, 0.2, gpu=True) for _ in range(3))
    for pace in (alone, beside, own):
        pace.begin((20_000.0, 0.004))
    beside.decoding_elsewhere = 8
    short = own.choose(decoding=8, waiting=1)
    assert beside.choose(decoding=0, waiting=1) == short
    assert short < alone.choose(decoding=0, waiting=1) / 3
    beside.decoding_elsewhere = 0
    assert beside.choose(decoding=0, waiting=1) == alone.choose(decoding=0, waiting=1)
