"""`zmqengine doctor`: diagnosis of this machine, a model and a worker."""

from __future__ import annotations

import json

import click

from zmqengine.cli.advice import EXIT_FAILED
from zmqengine.cli.connection import keys_of
from zmqengine.cli.options import WorkerTarget, worker_options
from zmqengine.cli.quantities import byte_size
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.machine import look_at_machine
from zmqengine.doctor.model import look_at_model
from zmqengine.doctor.sockets import look_at_sockets
from zmqengine.doctor.workers import look_at_worker
from zmqengine.errors import ConfigError

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@worker_options
@click.option(
    "-m", "--model", default="pico", show_default=True, metavar="MODEL", help="The model that has to fit."
)
@click.option(
    "--memory-limit",
    type=byte_size,
    metavar="SIZE",
    help="Memory that MLX may use, if not what the system reports.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings as well.")
def doctor(target: WorkerTarget, model: str, memory_limit: int | None, as_json: bool, strict: bool) -> int:
    """Check this machine, a model and a worker; each finding is one line with advice.

    Exit code 0 if nothing failed, 1 if something did.
    """
    machine = look_at_machine()
    findings = [
        *machine.findings,
        *look_at_model(model, memory_limit or machine.limit_bytes),
        *look_at_sockets(),
        *_worker(target),
    ]
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"{click.style(f'{finding.level:4}', fg=_COLOURS[finding.level])}  {finding.line}")
    bad = {"fail", "warn"} if strict else {"fail"}
    return EXIT_FAILED if any(finding.level in bad for finding in findings) else 0


def _worker(target: WorkerTarget) -> list[Finding]:
    try:
        keys = keys_of(target)
    except ConfigError as error:
        return [Finding("fail", "keys", str(error))]
    return list(look_at_worker(target.address, keys, required=target.address is not None))
