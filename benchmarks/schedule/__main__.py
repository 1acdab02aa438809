"""`python -m benchmarks.schedule`: waiting times under several orders of service, replayed without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zmqengine.cli.commands.bench import (
    OUT_FILE,
    REPORT_FILE,
    finish,
    out_option,
    plot_option,
    ranges_option,
    show_progress,
)


@click.command()
@click.option("--trace", type=REPORT_FILE, help="Requests as JSON lines or CSV, in place of made ones.")
@click.option("--keep-trace", type=OUT_FILE, help="Write the requests that were made here, as JSON lines.")
@click.option("--rounds", default=1, show_default=True, help="Each with requests of its own.")
@click.option("--size", type=click.Choice(["small", "normal"]), default="normal", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=JSON", help="A size or a cost: rows=128.")
@click.option("--seed", default=1, show_default=True, help="Makes the requests.")
@out_option
@plot_option
@ranges_option
def schedule(
    keep_trace: Path | None,
    size: str,
    settings: tuple[str, ...],
    out: Path | None,
    picture: Path | None,
    ranges: bool,
    **others: Any,
) -> None:
    """Waiting times under several orders of service: a replay without an engine.

    1,000 front-ends and 100,000 requests by default, in about a minute: the worker's own order of service against
    first come, first served and against strict priorities, on a machine whose steps cost what --set says.
    """
    from benchmarks.schedule.arrivals import generate, write_requests
    from benchmarks.schedule.machine import Machine
    from benchmarks.schedule.options import SMALL, ScheduleOptions
    from benchmarks.schedule.run import SchedulePlan
    from benchmarks.schedule.run import schedule as run
    from zmqengine.bench.arguments import with_settings

    options = with_settings(SMALL if size == "small" else ScheduleOptions(), settings)
    if keep_trace:
        write_requests(generate(options, Machine(options), others["seed"]), keep_trace)
    finish(run(SchedulePlan(options=options, **others), show_progress), out, picture, ranges)


if __name__ == "__main__":
    schedule()
