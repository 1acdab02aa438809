"""Arrivals of requests, generated from a seed or read from a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy
from msgspec import Meta

from benchmarks.schedule.machine import Machine
from benchmarks.schedule.options import ScheduleOptions
from zmqengine.bench.targets.target import TargetError

Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its arrival in seconds from the start, lengths, session and priority."""

    arrival_s: Annotated[float, Meta(ge=0)]
    prompt_tokens: Count
    output_tokens: Count
    session: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0


class Habit(NamedTuple):
    """Behaviour of one kind of front-end: its share of front-ends and of requests, and the requests it sends.

    Requests come in bursts of geometric size; a burst of 1 is a Poisson process. Lengths are log-normal.
    """

    name: str
    sessions: float
    requests: float
    priority: int
    burst: float
    prompt_median: int
    output_median: int


HABITS = (
    Habit("chat", 0.70, 0.35, -1, 1.0, 300, 120),
    Habit("agent", 0.25, 0.35, 0, 6.0, 900, 90),
    Habit("flood", 0.02, 0.15, 0, 200.0, 300, 150),
    Habit("job", 0.03, 0.15, 1, 400.0, 500, 200),
)
LENGTH_SIGMA = 0.8
LENGTHS_MAX = (16_000, 2_000)


def generate(options: ScheduleOptions, machine: Machine, seed: int) -> list[TracedRequest]:
    """Requests of front-ends of four kinds, over the time the machine needs for them at the given load; by time."""
    random = numpy.random.default_rng(seed)
    made = [_lengths(random, habit, round(options.requests * habit.requests)) for habit in HABITS]
    work_s = sum(
        machine.work_s(int(prompt), int(output))
        for pair in made
        for prompt, output in zip(*pair, strict=True)
    )
    span_s = work_s / options.load
    requests: list[TracedRequest] = []
    for habit, (prompts, outputs) in zip(HABITS, made, strict=True):
        times, owners = _bursts(random, habit, len(prompts), max(1, round(options.sessions * habit.sessions)))
        requests += [
            TracedRequest(
                arrival_s=float(time) * span_s,
                prompt_tokens=int(prompt),
                output_tokens=int(output),
                session=f"{habit.name} {owner}",
                priority=habit.priority,
            )
            for time, owner, prompt, output in zip(times, owners, prompts, outputs, strict=True)
        ]
    return sorted(requests, key=lambda request: request.arrival_s)


def read_requests(path: Path) -> list[TracedRequest]:
    """The requests of a file, by time: JSON lines or CSV with arrival_s, prompt_tokens, output_tokens and optionally
    session and priority; other columns are ignored. Raises TargetError, naming the malformed line.
    """
    text = path.read_text(encoding="utf-8")
    lines: Sequence[Any] = text.splitlines()
    if path.suffix == ".csv":
        lines = list(csv.DictReader(lines))
    requests: list[TracedRequest] = []
    try:
        for line in lines:
            row = line if isinstance(line, dict) else msgspec.json.decode(line)
            requests.append(msgspec.convert(row, TracedRequest, strict=False))
    except msgspec.DecodeError as error:
        raise TargetError(f"{path}: request {len(requests) + 1}: {error}") from error
    if not requests:
        raise TargetError(
            f"{path} has no requests: give lines with arrival_s, prompt_tokens and output_tokens"
        )
    return sorted(requests, key=lambda request: request.arrival_s)


def write_requests(requests: Sequence[TracedRequest], path: Path) -> None:
    """Write requests as JSON lines, which `read_requests` reads."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(requests))


def _lengths(random: numpy.random.Generator, habit: Habit, count: int) -> tuple[Any, Any]:
    medians = (habit.prompt_median, habit.output_median)
    prompts, outputs = (
        numpy.clip(random.lognormal(numpy.log(median), LENGTH_SIGMA, count), 1, most)
        for median, most in zip(medians, LENGTHS_MAX, strict=True)
    )
    return prompts, outputs


def _bursts(random: numpy.random.Generator, habit: Habit, count: int, sessions: int) -> tuple[Any, Any]:
    """The time of each request as a share of the whole, and its front-end: some send more than others."""
    sizes = random.geometric(1 / habit.burst, count)
    first = numpy.repeat(numpy.arange(count), sizes)[:count]
    weights = 1 / numpy.arange(1, sessions + 1) ** 0.7
    times = random.random(count)
    owners = random.choice(sessions, size=count, p=weights / weights.sum())
    return times[first], owners[first]
