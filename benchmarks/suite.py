"""`python -m benchmarks.suite`: every run behind the figures of the README.

Each part leaves `PART.json` and `PART.svg`. The models have random weights, so nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import msgspec

from benchmarks.overhead import OverheadOptions, OverheadPlan, overhead
from zmqengine.bench import stoppable
from zmqengine.bench.models.random_model import model_directory_of
from zmqengine.bench.options import SMALL, ScenarioOptions
from zmqengine.bench.reports.plot import plot
from zmqengine.bench.reports.report import BenchReport, save
from zmqengine.bench.serve import ServePlan, serve
from zmqengine.bench.servers.started import StartPlan
from zmqengine.bench.targets.target import TargetError
from zmqengine.cli.commands.bench import show_progress

Progress = Callable[[str], None]

HOST_SHAPE, MODEL_SHAPE = "0.2m", "25m"
TIMEOUT_S = 60.0
"""Some servers lose connections when many arrive at once: the client must stop waiting for them."""


class Part(NamedTuple):
    """One run of the suite; `model` is pico or a shape."""

    name: str
    model: str
    plan: Callable[[str, int], ServePlan | OverheadPlan]


def parts(*, quick: bool) -> list[Part]:
    """All runs, the most important first. `quick` is a smoke test."""
    return [
        Part("overhead-0.2m", HOST_SHAPE, lambda m, r: _overhead(m, r, quick, http=2, mlx_lm=True)),
        Part("overhead-pico", "pico", lambda m, r: _overhead(m, r, quick)),
        Part("overhead-25m", MODEL_SHAPE, lambda m, r: _overhead(m, r, quick, http=1, sizes=_REAL_SIZES)),
        Part("users-0.2m", HOST_SHAPE, lambda m, r: _serve(m, r, quick, ["users"], _host_sizes(quick))),
        Part("chat-25m", MODEL_SHAPE, lambda m, r: _serve(m, min(r, 1), quick, ["chat"], _chat_sizes(quick))),
        Part("users-25m", MODEL_SHAPE, lambda m, r: _serve(m, r, quick, ["users"])),
        Part(
            "shapes-25m",
            MODEL_SHAPE,
            lambda m, r: _serve(m, min(r, 2), quick, SHAPES_OF_LOAD),
        ),
        Part("stress-25m", MODEL_SHAPE, lambda m, r: _serve(m, min(r, 2), quick, STRESS)),
        Part("front-ends-25m", MODEL_SHAPE, lambda m, r: _serve(m, min(r, 2), quick, ("front-ends",))),
        Part("cancel-25m", MODEL_SHAPE, lambda m, r: _serve(m, min(r, 2), quick, ["cancel"], slots=True)),
        Part("two-models-25m", MODEL_SHAPE, lambda m, r: _two_models(m, r, quick)),
    ]


SHAPES_OF_LOAD = ("burst", "prefix", "agents", "trace")
STRESS = ("interference", "overload")


def run_suite(
    out: Path,
    models: Path | None,
    *,
    quick: bool = False,
    rounds: int = 3,
    only: Sequence[str] = (),
    on_progress: Progress,
) -> None:
    """Run the parts and write their reports and pictures into `out`. Raises TargetError for an unknown part."""
    chosen = [part for part in parts(quick=quick) if not only or part.name in only]
    if unknown := set(only) - {part.name for part in chosen}:
        names = ", ".join(part.name for part in parts(quick=quick))
        raise TargetError(f"unknown parts: {', '.join(sorted(unknown))}; there are {names}")
    with TemporaryDirectory(prefix="zmqengine-bench-models-") as scratch:
        for part in chosen:
            model = _model(part.model, models or Path(scratch))
            started_s = time.monotonic()
            report = run_part(part.plan(model, rounds), partial(_tell, on_progress, part.name))
            save(report, out / f"{part.name}.json")
            plot(report, out / f"{part.name}.svg")
            on_progress(f"{part.name}: done in {time.monotonic() - started_s:.0f} s\n")


def run_part(plan: ServePlan | OverheadPlan, on_progress: Progress) -> BenchReport:
    """One run."""
    if isinstance(plan, OverheadPlan):
        return stoppable.run(overhead(plan, on_progress))
    return stoppable.run(serve(plan, on_progress))


def _tell(on_progress: Progress, part: str, text: str) -> None:
    on_progress(f"{part}: {text}")


def _model(name: str, directory: Path) -> str:
    return name if name == "pico" else str(model_directory_of(name, directory))


def _seed() -> int:
    return int(time.time())


# Fewer requests are enough for a slower model.
_REAL_SIZES = OverheadOptions(
    streams=(1, 16, 32), processes=1, requests_min=4, requests_per_stream=2, burst=200
)


def _overhead(
    model: str,
    rounds: int,
    quick: bool,
    *,
    http: int = 0,
    mlx_lm: bool = False,
    sizes: OverheadOptions | None = None,
) -> OverheadPlan:
    options = sizes or OverheadOptions()
    if quick:
        options = msgspec.structs.replace(
            options,
            streams=(1, 4),
            processes=2,
            max_tokens=16,
            requests_min=4,
            requests_per_stream=1,
            burst=min(options.burst, 8),
            idle_s=1.0,
        )
    return OverheadPlan(model=model, http=http, mlx_lm=mlx_lm, options=options, rounds=rounds, seed=_seed())


def _serve(
    model: str,
    rounds: int,
    quick: bool,
    scenarios: Sequence[str],
    options: ScenarioOptions | None = None,
    *,
    slots: bool = False,
) -> ServePlan:
    options = options or (SMALL if quick else ScenarioOptions())
    return ServePlan(
        scenarios=tuple(scenarios),
        start=StartPlan(model=model, http=1, mlx_lm=True, slots=options.slots if slots else 0),
        options=msgspec.structs.replace(options, timeout_s=TIMEOUT_S),
        rounds=rounds,
        seed=_seed(),
    )


def _host_sizes(quick: bool) -> ScenarioOptions:
    """More requests: each takes next to no time."""
    if quick:
        return SMALL
    return ScenarioOptions(users=(1, 4, 8, 16, 32), requests_min=32, requests_per_user=6)


def _chat_sizes(quick: bool) -> ScenarioOptions:
    """One minute, from the first request on, of as many users as two cores serve."""
    if quick:
        return SMALL
    return ScenarioOptions(chat_users=(1, 4, 8, 16), chat_minutes=1)


def _two_models(model: str, rounds: int, quick: bool) -> ServePlan:
    return ServePlan(
        scenarios=("two-models",),
        start=StartPlan(model=model, second=True),
        options=SMALL if quick else ScenarioOptions(),
        rounds=rounds,
        seed=_seed(),
    )


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmarks"), show_default=True
)
@click.option(
    "--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the random models here."
)
@click.option("--quick", is_flag=True, help="A small run, to check that everything works.")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--part", "only", multiple=True, help="Only these parts. [default: all]")
def main(out: Path, models: Path | None, quick: bool, rounds: int, only: tuple[str, ...]) -> None:
    """Measure everything that the README claims, in about twenty minutes."""
    run_suite(out, models, quick=quick, rounds=rounds, only=only, on_progress=show_progress)


if __name__ == "__main__":
    main()
