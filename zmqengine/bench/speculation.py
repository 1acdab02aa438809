"""`bench speculation`: one engine with drafts and one without, in turns, on the same prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from zmqengine.engine.blas import load_tuned_blas

# Before anything imports MLX, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

from zmqengine.bench import echo_model  # noqa: E402
from zmqengine.bench import machine as this_machine  # noqa: E402
from zmqengine.bench.erring_source import ErringSource  # noqa: E402
from zmqengine.bench.measures import Measures  # noqa: E402
from zmqengine.bench.report import Cell, ModelFacts, Report, TargetFacts  # noqa: E402
from zmqengine.engine.drafts.opening import open_speculation  # noqa: E402
from zmqengine.engine.drafts.speculation import Speculation  # noqa: E402
from zmqengine.engine.engine_options import EngineOptions  # noqa: E402
from zmqengine.engine.interface import ModelInfo, RowRequest, Sampling  # noqa: E402
from zmqengine.engine.loader import evaluate, load  # noqa: E402
from zmqengine.engine.mlx_engine import MlxEngine  # noqa: E402
from zmqengine.pico import model_path  # noqa: E402

Progress = Callable[[str], None]


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. `acceptance` is the chance of each token of `set drafts` to be right."""

    streams: tuple[int, ...] = (1, 8, 32)
    echo_words: int = 150
    new_tokens: int = 150
    set_tokens: int = 100
    acceptance: float = 0.7


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. New text is what `model` writes."""

    options: SpeculationOptions = SpeculationOptions()
    work: tuple[str, ...] = ("echo", "new text")
    model: str = "pico"
    rounds: int = 5
    seed: int = 0


class Work(NamedTuple):
    """A model and the requests for it; the outputs are known where drafts are to be of a set quality."""

    model: Any
    info: ModelInfo
    requests: Callable[[int, int], list[RowRequest]]


class Outcome(NamedTuple):
    """What a run took from the first step in which all rows had a token."""

    tokens: int
    seconds: float
    steps: int
    proposed: int
    accepted: int
    outputs: dict[int, list[int]]


def speculation(plan: SpeculationPlan, on_progress: Progress) -> Report:
    """Run each work with as many streams as the options say, off and on in turns."""
    started_at, facts, notes = this_machine.now(), this_machine.machine_facts(), this_machine.busy_notes()
    cells: list[Cell] = []
    differing = 0
    for name in plan.work:
        work = _work(name, plan, on_progress)
        for streams in plan.options.streams:
            engines = {label: _engine(work, label, name) for label in ("off", "on")}
            for number in range(-1, plan.rounds):
                requests = work.requests(streams, 1000 * plan.seed + number)
                outcomes: dict[str, Outcome] = {}
                for label in ("off", "on") if number % 2 or name == "set drafts" else ("on", "off"):
                    on_progress(f"{name}, {streams} streams, round {number + 1} of {plan.rounds}, {label}")
                    if name == "set drafts" and label == "on":
                        known = {tuple(r.prompt): outcomes["off"].outputs[r.row] for r in requests}
                        engines[label].set_sources([ErringSource(known, plan.options.acceptance)])
                    outcomes[label] = _run(engines[label].engine, requests)
                # The first is to get warm.
                if number >= 0:
                    differing += outcomes["off"].outputs != outcomes["on"].outputs
                    cells += [_cell(name, streams, label, number, o) for label, o in outcomes.items()]
            for engine in engines.values():
                engine.engine.close()
    if differing:
        differ = (
            f"in {differing} runs an output differed with drafts: kernels of other widths round differently"
        )
        notes = [*notes, differ]
    return Report(
        kind="speculation",
        started_at=started_at,
        command=this_machine.command_line(),
        machine=facts,
        versions=this_machine.versions(),
        model=ModelFacts(name=f"the echo model, and {plan.model} for new text"),
        options={**msgspec.to_builtins(plan.options), "rounds": plan.rounds, "seed": plan.seed},
        base="off",
        targets=[TargetFacts(label=label, kind="engine") for label in ("off", "on")],
        cells=cells,
        notes=notes,
    )


class _Engine:
    """An engine whose sources can be changed between runs."""

    def __init__(self, engine: MlxEngine, speculation: Speculation | None) -> None:
        self.engine = engine
        self._speculation = speculation

    def set_sources(self, sources: Sequence[Any]) -> None:
        assert self._speculation is not None
        self._speculation.sources = sources


def _engine(work: Work, label: str, name: str) -> _Engine:
    speculation = open_speculation("auto", work.info.vocab_size) if label == "on" else None
    options = EngineOptions(prompt_cache_bytes=0, prefill_chunk=4096, prefill_ms=0)
    engine = MlxEngine(work.model, work.info, options, speculation=speculation)
    return _Engine(engine, speculation)


def _work(name: str, plan: SpeculationPlan, on_progress: Progress) -> Work:
    options = plan.options
    if name == "echo":
        model = echo_model.build(options.echo_words)
        info = ModelInfo("echo", echo_model.VOCAB_SIZE, 2048, frozenset(), evaluate(model))
        return Work(model, info, lambda streams, seed: _echo(streams, seed, options.echo_words))
    loaded = load(str(model_path(plan.model)) if plan.model == "pico" else plan.model)
    tokens = options.new_tokens if name == "new text" else options.set_tokens
    sampling = Sampling(temperature=1.0) if name == "new text" else Sampling()
    vocab_size = loaded.info.vocab_size

    def requests(streams: int, seed: int) -> list[RowRequest]:
        draw = random.Random(seed)
        prompts = [[draw.randrange(vocab_size) for _ in range(16)] for _ in range(streams)]
        return [
            RowRequest(row, prompt, tokens, sampling=sampling, seed=row) for row, prompt in enumerate(prompts)
        ]

    return Work(loaded.model, loaded.info, requests)


def _echo(streams: int, seed: int, words: int) -> list[RowRequest]:
    draw = random.Random(seed)
    texts = [echo_model.document(draw, words) for _ in range(streams)]
    return [RowRequest(row, echo_model.prompt(text), words) for row, text in enumerate(texts)]


def _run(engine: MlxEngine, requests: list[RowRequest]) -> Outcome:
    outputs: dict[int, list[int]] = {request.row: [] for request in requests}
    assert engine.insert(requests) == []
    left, started_s = len(requests), 0.0
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
    return Outcome(tokens, time.perf_counter() - started_s, steps, proposed, accepted, outputs)


def _cell(name: str, streams: int, label: str, number: int, outcome: Outcome) -> Cell:
    measures: Measures = {
        "tokens_per_s": outcome.tokens / outcome.seconds,
        "steps_per_token": outcome.steps * streams / outcome.tokens,
    }
    if outcome.proposed:
        measures["accepted_share"] = outcome.accepted / outcome.proposed
    return Cell(scenario=name, case=f"{streams} streams", target=label, round=number, measures=measures)
