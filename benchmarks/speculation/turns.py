"""One engine with draft tokens and one without, a few steps in turns, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.speculation.work import (  # first: it chooses what MLX binds to
    Outputs,
    SpeculationOptions,
    Work,
    open_work,
)

# isort: split
import mlx.core as mx
import msgspec

from zmqengine.bench.load.measures import Measures
from zmqengine.bench.reports import machine as this_machine
from zmqengine.bench.reports.report import BenchReport, Cell, ModelFacts, TargetFacts
from zmqengine.engine.interface import RowRequest, StepResult
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.speculation.speculator import Speculator
from zmqengine.engine.step.mlx_engine import MlxEngine

Progress = Callable[[str], None]
# Steps of one engine before the other's turn.
_TURN_STEPS = 20


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

    tokens_per_s: float
    full_tokens_per_s: float
    steps_per_token: float
    proposed: int
    accepted: int
    outputs: Outputs


def speculation(plan: SpeculationPlan, on_progress: Progress) -> BenchReport:
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
    return BenchReport(
        kind="speculation",
        model=ModelFacts(name=f"the echo, edit and headed models, and {plan.model} for other work"),
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
        self._off = _engine(work, None, work.plain)
        self._speculator = work.speculator()
        self._on = _engine(work, self._speculator)

    def run(self, requests: list[RowRequest], *, off_first: bool) -> dict[str, Outcome]:
        """Both make the same tokens, some steps by turns: what holds the machine up holds up both."""
        if self._work.known is not None and self._speculator is not None:
            alone = _Run(self._off, requests)
            while alone.left:
                alone.advance()
            self._speculator.lookups = [self._work.known(requests, alone.outputs)]
        off, on = _Run(self._off, requests), _Run(self._on, requests)
        turns = [off, on] if off_first else [on, off]
        while off.left or on.left:
            for run in turns:
                run.advance()
        return {"off": off.outcome(), "on": on.outcome()}

    def close(self) -> None:
        self._off.close()
        self._on.close()


def _engine(work: Work, speculator: Speculator | None, runner: ModelRunner | None = None) -> MlxEngine:
    options = EngineOptions(prompt_cache_bytes=0, prefill_chunk=4096, prefill_ms=0)
    return MlxEngine(runner or work.runner, work.info, options, speculator=speculator)


class _Run:
    """An engine makes the outputs of some requests, `left` of which have not ended."""

    def __init__(self, engine: MlxEngine, requests: list[RowRequest]) -> None:
        self._engine = engine
        self._rows = self.left = len(requests)
        self.outputs: Outputs = {request.row: [] for request in requests}
        self._steps = self._tokens = self._proposed = self._accepted = 0
        self._timed_tokens, self._timed_s, self._full_tokens_per_s = 0, 0.0, 0.0
        assert engine.insert(requests) == []

    def advance(self) -> None:
        """Some steps more, or those until all rows have a token. The time of the first is not taken: it hands on what
        was made while others were waited for. What it leaves on its way has ended when this returns."""
        while not all(self.outputs.values()):
            self._next()
        self._step()
        for _ in range(_TURN_STEPS):
            if not self.left:
                break
            started_s = time.perf_counter()
            tokens = self._step()
            self._timed_s += time.perf_counter() - started_s
            self._timed_tokens += tokens
            if self.left == self._rows:
                self._full_tokens_per_s = self._timed_tokens / self._timed_s
        mx.synchronize()

    def outcome(self) -> Outcome:
        return Outcome(
            self._timed_tokens / self._timed_s,
            self._full_tokens_per_s,
            self._steps * self._rows / self._tokens,
            self._proposed,
            self._accepted,
            self.outputs,
        )

    def _step(self) -> int:
        """Returns how many tokens it made."""
        if not self.left:
            return 0
        result = self._next()
        self._steps += 1
        self._tokens += len(result.tokens)
        self._proposed += sum(draft.proposed for draft in result.drafts)
        self._accepted += sum(draft.accepted for draft in result.drafts)
        return len(result.tokens)

    def _next(self) -> StepResult:
        result = self._engine.next()
        for token in result.tokens:
            self.outputs[token.row].append(token.token)
            self.left -= token.finish is not None
        return result


def _cell(name: str, streams: int, label: str, number: int, outcome: Outcome) -> Cell:
    measures: Measures = {
        "tokens_per_s": outcome.tokens_per_s,
        "full_tokens_per_s": outcome.full_tokens_per_s,
        "steps_per_token": outcome.steps_per_token,
    }
    if outcome.proposed:
        measures["accepted_share"] = outcome.accepted / outcome.proposed
    return Cell(scenario=name, case=f"{streams} streams", target=label, round=number, measures=measures)
