"""`bench speculation`: one engine with drafts and one without, in turns, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from zmqengine.bench.speculation_work import (  # first: it chooses what MLX binds to
    Outputs,
    SpeculationOptions,
    Work,
    open_work,
)

# isort: split
import msgspec

from zmqengine.bench import machine as this_machine
from zmqengine.bench.measures import Measures
from zmqengine.bench.report import Cell, ModelFacts, Report, TargetFacts
from zmqengine.engine.drafts.speculation import Speculation
from zmqengine.engine.engine_options import EngineOptions
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.mlx_engine import MlxEngine

Progress = Callable[[str], None]


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. New text is what `model` writes; `draft` drafts for it where the work is to be that."""

    options: SpeculationOptions = SpeculationOptions()
    work: tuple[str, ...] = ("echo", "new text")
    model: str = "pico"
    draft: str | None = None
    rounds: int = 5
    seed: int = 0


class Outcome(NamedTuple):
    """What a run took from the first step in which all rows had a token; and those tokens a second that it made until
    the first row ended: rows whose drafts are good end sooner, and leave the others alone."""

    tokens: int
    seconds: float
    full_tokens_per_s: float
    steps: int
    proposed: int
    accepted: int
    outputs: Outputs


def speculation(plan: SpeculationPlan, on_progress: Progress) -> Report:
    """Run each work with as many streams as the options say, off and on in turns."""
    setting = this_machine.setting()
    cells: list[Cell] = []
    differing = 0
    for name in plan.work:
        on_progress(f"{name}: loading")
        work = open_work(name, plan.model, plan.draft, plan.options)
        for streams in plan.options.streams:
            pair = _Pair(work)
            # The first is to get warm.
            for number in range(-1, plan.rounds):
                on_progress(f"{name}, {streams} streams, round {number + 1} of {plan.rounds}")
                requests = work.requests(streams, 1000 * plan.seed + number)
                outcomes = pair.run(requests, off_first=number % 2 == 1)
                if number >= 0:
                    differing += outcomes["off"].outputs != outcomes["on"].outputs
                    cells += [_cell(name, streams, label, number, o) for label, o in outcomes.items()]
            pair.close()
    if differing:
        differ = (
            f"in {differing} runs an output differed with drafts: kernels of other widths round differently"
        )
        setting["notes"].append(differ)
    return Report(
        kind="speculation",
        model=ModelFacts(name=f"the echo and edit models, and {plan.model} for other work"),
        options={**msgspec.to_builtins(plan.options), "rounds": plan.rounds, "seed": plan.seed},
        base="off",
        targets=[TargetFacts(label=label, kind="engine") for label in ("off", "on")],
        cells=cells,
        **setting,
    )


class _Pair:
    """An engine without drafts and one with, of the same model."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._off = _engine(work, None)
        self._speculation = work.speculation()
        self._on = _engine(work, self._speculation)

    def run(self, requests: list[RowRequest], *, off_first: bool) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        known = self._work.known
        for label in ("off", "on") if off_first or known is not None else ("on", "off"):
            if label == "on" and known is not None and self._speculation is not None:
                self._speculation.sources = [known(requests, outcomes["off"].outputs)]
            outcomes[label] = _run(self._off if label == "off" else self._on, requests)
        return outcomes

    def close(self) -> None:
        self._off.close()
        self._on.close()


def _engine(work: Work, speculation: Speculation | None) -> MlxEngine:
    options = EngineOptions(prompt_cache_bytes=0, prefill_chunk=4096, prefill_ms=0)
    return MlxEngine(work.model, work.info, options, speculation=speculation)


def _run(engine: MlxEngine, requests: list[RowRequest]) -> Outcome:
    outputs: Outputs = {request.row: [] for request in requests}
    assert engine.insert(requests) == []
    left, started_s, full_tokens_per_s = len(requests), 0.0, 0.0
    tokens = steps = proposed = accepted = 0
    while left:
        result = engine.next()
        if started_s:
            steps += 1
            tokens += len(result.tokens)
            proposed += sum(draft.proposed for draft in result.drafts)
            accepted += sum(draft.accepted for draft in result.drafts)
        for token in result.tokens:
            outputs[token.row].append(token.token)
            left -= token.finish is not None
        if not started_s and all(outputs.values()):
            started_s = time.perf_counter()
        elif left < len(requests) and not full_tokens_per_s:
            full_tokens_per_s = tokens / (time.perf_counter() - started_s)
    seconds = time.perf_counter() - started_s
    return Outcome(tokens, seconds, full_tokens_per_s, steps, proposed, accepted, outputs)


def _cell(name: str, streams: int, label: str, number: int, outcome: Outcome) -> Cell:
    measures: Measures = {
        "tokens_per_s": outcome.tokens / outcome.seconds,
        "full_tokens_per_s": outcome.full_tokens_per_s,
        "steps_per_token": outcome.steps * streams / outcome.tokens,
    }
    if outcome.proposed:
        measures["accepted_share"] = outcome.accepted / outcome.proposed
    return Cell(scenario=name, case=f"{streams} streams", target=label, round=number, measures=measures)
