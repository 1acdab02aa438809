"""`python -m benchmarks.speculation`: one engine with draft tokens and one without, a few steps in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zmqengine.cli.commands.bench import finish, out_option, ranges_option, show_progress

SPECULATION_WORK = (
    "echo", "edit", "edit draft", "head", "sampled head", "new text", "sampled text", "set drafts", "draft model",
)  # fmt: skip


@click.command()
@click.option("--work", multiple=True, type=click.Choice(SPECULATION_WORK), default=("echo", "new text"))
@click.option(
    "--model", default="pico", show_default=True, help="Pico or a directory; not for echo, edit and head."
)
@click.option("--draft", help="The directory of the smaller model of --work 'draft model'.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=JSON", help="A size: streams=[1,32].")
@click.option("--seed", default=1, show_default=True, help="Makes the prompts.")
@out_option
@ranges_option
def speculation(settings: tuple[str, ...], out: Path | None, ranges: bool, **others: Any) -> None:
    """Measure what draft tokens gain where text repeats itself, and cost where it does not."""
    from benchmarks.speculation.turns import SpeculationPlan
    from benchmarks.speculation.turns import speculation as run
    from benchmarks.speculation.work import SpeculationOptions
    from zmqengine.bench.arguments import with_settings

    options = with_settings(SpeculationOptions(), settings)
    finish(run(SpeculationPlan(options=options, **others), show_progress), out, None, ranges)


if __name__ == "__main__":
    speculation()
