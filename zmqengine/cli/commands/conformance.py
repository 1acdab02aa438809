"""`zmqengine conformance`: conformance of a worker to the protocol."""

from __future__ import annotations

import click

from zmqengine.cli.advice import EXIT_FAILED
from zmqengine.cli.connection import keys_of
from zmqengine.cli.flags import WorkerTarget, worker_options_or
from zmqengine.cli.quantities import Seconds
from zmqengine.protocol.addresses import resolve
from zmqengine_client.keys import keys_from_environment


@click.command()
@worker_options_or("--address")
@click.option("-k", "--only", default="", metavar="TEXT", help="Try only the rules that contain this text.")
@click.option(
    "--answer-timeout", type=Seconds(0.1), default=10.0, show_default=True, metavar="SECONDS",
    help="Time-out of the worker's replies.",
)  # fmt: skip
@click.pass_context
def conformance(context: click.Context, *, target: WorkerTarget, only: str, answer_timeout: float) -> None:
    """Try every rule of the protocol's page on a running worker, ours or one in another language.

    One line for each rule; exit code 1 if one is broken. The rules are those of zmqengine/protocol/SPEC.md. The worker
    is asked for a few hundred tokens.
    """
    from zmqengine.conformance import check

    keys = keys_of(target) or keys_from_environment()
    broken = tried = 0
    for outcome in check(
        resolve(target.address),
        answer_s=answer_timeout,
        prepare=None if keys is None else keys.apply,
        only=only,
    ):
        tried += 1
        broken += bool(outcome.problem)
        verdict = click.style("broken", fg="red") if outcome.problem else click.style("kept  ", fg="green")
        click.echo(f"{verdict}  {outcome.rule.chapter}: {outcome.rule.says}")
        if outcome.problem:
            click.echo(f"        {outcome.problem}")
    if not tried:
        raise click.UsageError(f"no rule contains {only!r}")
    click.echo(f"{tried - broken} of {tried} rules kept", err=True)
    if broken:
        context.exit(EXIT_FAILED)
