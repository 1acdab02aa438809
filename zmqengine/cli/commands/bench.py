"""`zmqengine bench`: measure workers and other servers on the same work."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from zmqengine.bench.models.model_shapes import SHAPES
from zmqengine.bench.options import SMALL, ScenarioOptions
from zmqengine.bench.scenarios import SCENARIO_NAMES
from zmqengine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from zmqengine.bench.reports.report import BenchReport

NEEDED = ("numpy", "httptools", "psutil", "rich", "matplotlib")
FILE_WIDTH = 160
REPORT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
OUT_FILE = click.Path(path_type=Path, dir_okay=False)
# Options of most measurements.
seed_option = click.option(
    "--seed",
    type=int,
    callback=lambda context, option, value: int(time.time()) if value is None else value,
    help="Seed of the prompts. [default: the time]",
)
out_option = click.option("--out", type=OUT_FILE, help="Write the report here, as JSON.")
plot_option = click.option("--plot", "picture", type=OUT_FILE, help="Write a plot here, .png or .svg.")
ranges_option = click.option("--ranges", is_flag=True, help="Show minimum and maximum too.")


@click.group()
def bench() -> None:
    """Measure workers and other servers on the same work.

    \b
    zmqengine bench model --shape 25m --out /tmp/25m
    zmqengine bench serve --model /tmp/25m --start worker --start http --start mlx-lm --plot out.png
    zmqengine bench serve --url http://127.0.0.1:8080/v1 --url http://127.0.0.1:8081/v1
    """
    missing = [name for name in NEEDED if not _importable(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing: pip install 'zmqengine[bench]'")


@bench.command()
@click.option("--worker", "workers", multiple=True, metavar="[LABEL=]ADDRESS", help="A zmqengine worker.")
@click.option(
    "--url", "urls", multiple=True, metavar="[LABEL=]URL[#MODEL]", help="An OpenAI-compatible server."
)
@click.option("--api", type=click.Choice(["completions", "chat"]), default="completions", help="For --url.")
@click.option(
    "--start",
    multiple=True,
    type=click.Choice(["worker", "http", "mlx-lm", "vllm-mlx", "smg"]),
    help="Start this server for the run.",
)
@click.option("--model", default="pico", show_default=True, help="For --start: pico or a directory.")
@click.option("--second", is_flag=True, help="Start everything twice, for two-models.")
@click.option("--slots", type=int, default=0, help="Requests that a started server serves at once.")
@click.option(
    "--kernels",
    type=click.Choice(["auto", "mlx"]),
    default="auto",
    show_default=True,
    help="Kernels of a started worker.",
)
@click.option(
    "--scenario", "scenarios", multiple=True, type=click.Choice([*SCENARIO_NAMES, "all"]), default=["users"]
)
@click.option("--rounds", default=3, show_default=True, help="Runs of each case against each target.")
@click.option("--size", type=click.Choice(["small", "normal"]), default="normal", show_default=True)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=JSON", help="A size of a scenario: users=[1,8]."
)
@seed_option
@click.option("--base", default="", help="The label that ratios refer to. [default: the first target]")
@click.option("--tokenizer", default="", help="tokenizer.json, where no worker can provide it.")
@out_option
@plot_option
@ranges_option
def serve(
    workers: tuple[str, ...],
    urls: tuple[str, ...],
    api: str,
    start: tuple[str, ...],
    scenarios: tuple[str, ...],
    size: str,
    settings: tuple[str, ...],
    out: Path | None,
    picture: Path | None,
    ranges: bool,
    **others: Any,
) -> None:
    """Measure several servers, interleaved round by round."""
    from zmqengine.bench import stoppable
    from zmqengine.bench.arguments import server_target, with_settings, worker_target
    from zmqengine.bench.serve import ServePlan
    from zmqengine.bench.serve import serve as run
    from zmqengine.bench.servers.started import StartPlan

    slots = {"slots": others["slots"]} if others["slots"] else {}
    options = with_settings(SMALL if size == "small" else ScenarioOptions(), settings)
    plan = ServePlan(
        scenarios=SCENARIO_NAMES if "all" in scenarios else scenarios,
        targets=(*(worker_target(text) for text in workers), *(server_target(text, api) for text in urls)),
        start=StartPlan(
            model=others["model"],
            worker="worker" in start,
            http=start.count("http"),
            mlx_lm="mlx-lm" in start,
            vllm_mlx="vllm-mlx" in start,
            smg="smg" in start,
            second=others["second"],
            slots=others["slots"],
            options={"kernels": others["kernels"]},
        )
        if start
        else None,
        tokenizer=others["tokenizer"],
        options=msgspec.structs.replace(options, **slots),
        rounds=others["rounds"],
        seed=others["seed"],
        base=others["base"],
    )
    finish(stoppable.run(run(plan, show_progress)), out, picture, ranges)


@bench.command()
@click.argument("first", type=REPORT_FILE)
@click.argument("second", type=REPORT_FILE)
@click.option(
    "--same", multiple=True, metavar="LABEL=LABEL", help="A target with another name in the second report."
)
@click.option("--all", "everything", is_flag=True, help="Every measure, not only the main ones.")
def compare(first: Path, second: Path, same: tuple[str, ...], everything: bool) -> None:
    """Compare two reports: ratios, with differences within noise marked."""
    from zmqengine.bench.arguments import name_and_value
    from zmqengine.bench.reports.compare import compare as pairs
    from zmqengine.bench.reports.compare import comparison_table
    from zmqengine.bench.reports.report import load
    from zmqengine.bench.reports.tables import rich_table

    renamed = dict(name_and_value(text, "--same") for text in same)
    table = comparison_table(pairs(load(first), load(second), renamed), everything=everything)
    _console().print(rich_table(table))


@bench.command()
@click.argument("report", type=REPORT_FILE)
@plot_option
@ranges_option
def show(report: Path, picture: Path | None, ranges: bool) -> None:
    """Print or plot a saved report."""
    from zmqengine.bench.reports.report import load

    finish(load(report), None, picture, ranges)


@bench.command()
@click.option("--shape", type=click.Choice(tuple(SHAPES)), default="25m", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--bits", type=click.Choice(["4", "8"]), help="Quantise the weights.")
@click.option("--seed", default=0, show_default=True)
def model(shape: str, out: Path, bits: str | None, seed: int) -> None:
    """Make a model of random weights, for machines that cannot download one."""
    from zmqengine.bench.models.random_model import make_model

    parameters = make_model(shape, SHAPES[shape], out, bits=int(bits) if bits else None, seed=seed)
    show_progress(f"{parameters:,} random weights in {out}")
    click.echo(out)


def finish(report: BenchReport, out: Path | None, picture: Path | None, ranges: bool) -> None:
    from zmqengine.bench.reports.report import save
    from zmqengine.bench.reports.tables import show as show_tables

    if out:
        save(report, out)
    show_tables(report, _console(), ranges=ranges)
    if picture:
        from zmqengine.bench.reports.plot import plot

        plot(report, picture)


def _console() -> Console:
    """A console as wide as the terminal; of a fixed width for a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def show_progress(text: str) -> None:
    """Show a progress line that replaces the last one; on a pipe, print lines."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
    else:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
