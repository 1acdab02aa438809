"""`trace`: an open loop of requests with arrival times and lengths from a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import NamedTuple

from zmqengine.bench.load.loops import open_loop
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.target import TargetError

SAMPLE = Path(__file__).parent / "sample_trace.jsonl"


class TraceLine(NamedTuple):
    """One request: its arrival in seconds from the start, and lengths in tokens; `shared_tokens` begin all prompts."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0


def read_trace(path: Path) -> list[TraceLine]:
    """The requests of a file, by time: JSON lines or CSV with arrival_s, prompt_tokens, output_tokens, shared_tokens.

    `shared_tokens` may be left out. Raises TargetError, naming the line, for a malformed one.
    """
    text = path.read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines()) if path.suffix == ".csv" else map(json.loads, text.splitlines())
    lines: list[TraceLine] = []
    try:
        for row in rows:
            lines.append(
                TraceLine(
                    float(row["arrival_s"]),
                    int(row["prompt_tokens"]),
                    int(row["output_tokens"]),
                    int(row.get("shared_tokens") or 0),
                )
            )
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{path}: request {len(lines) + 1}: {error!r}") from error
    return sorted(lines)


def cases(options: ScenarioOptions) -> list[str]:
    """One case: the file name and the speed of the replay."""
    return [f"{Path(options.trace or SAMPLE).name} x{options.trace_speed:g}"]


async def run(context: Context, case: str) -> Measures:
    """Replay the file."""
    options = context.options
    lines = read_trace(Path(options.trace or SAMPLE))
    shared = context.prompts.text(max(line.shared_tokens for line in lines)).split()
    requests = [
        context.prompts.request(
            max(1, line.prompt_tokens - line.shared_tokens),
            line.output_tokens,
            prefix=" ".join(["", *shared[: line.shared_tokens]]),
        )
        for line in lines
    ]
    arrivals_s = [line.arrival_s / options.trace_speed for line in lines]
    return summarise(context.records(await open_loop(context.session, requests, arrivals_s)))


SCENARIO = Scenario(
    name="trace",
    cases=cases,
    run=run,
    shown=("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "completed"),
)
