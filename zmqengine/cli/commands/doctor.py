"""`zmqengine doctor`: diagnosis of this machine, a model and a worker."""

from __future__ import annotations

import json
from pathlib import Path

import click

from zmqengine.cli.advice import EXIT_FAILED
from zmqengine.cli.connection import FRONT_END_URL, keys_of, launched_models
from zmqengine.cli.flags import WorkerTarget, worker_options
from zmqengine.cli.quantities import byte_size
from zmqengine.doctor.device_report import DeviceReporter
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.front_ends import look_at_front_end
from zmqengine.doctor.launchers import look_at_launcher
from zmqengine.doctor.machine import Machine, look_at_machine
from zmqengine.doctor.model import look_at_model
from zmqengine.doctor.report_file import read_reports
from zmqengine.doctor.report_table import table_of
from zmqengine.doctor.socket_directory import look_at_sockets
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
@click.option(
    "--url",
    help="Where a front-end would be, to look at.  [default: that of `zmqengine serve`, else http://127.0.0.1:8000]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings as well.")
@click.option(
    "--metal-report",
    is_flag=False,
    flag_value="zmqengine-report.json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="[FILE]",
    help="Also run the engine's own checks on this machine's GPU (at most 5 minutes, no network), and write all to "
    "FILE, zmqengine-report.json if not given: to attach to an issue.",
)
@click.argument("reports", nargs=-1, type=click.Path(dir_okay=False, path_type=Path))
def doctor(
    target: WorkerTarget,
    model: str,
    memory_limit: int | None,
    url: str | None,
    as_json: bool,
    strict: bool,
    metal_report: Path | None,
    reports: tuple[Path, ...],
) -> int:
    """Check this machine, a model, a worker and a front-end; each finding is one line with advice.

    With REPORTS, files that `--metal-report` wrote, print the table of their machines and nothing else.
    Exit code 0 if nothing failed, 1 if something did.
    """
    if reports:
        return _print_table(reports)
    machine = look_at_machine()
    listed = None if target.is_named else launched_models()
    findings = [
        *machine.findings,
        *look_at_model(model, memory_limit or machine.limit_bytes),
        *look_at_sockets(),
        *look_at_launcher(listed),
        *([] if listed is not None else _worker(target)),
        *look_at_front_end(url or (listed.http if listed is not None else "") or FRONT_END_URL),
    ]
    if metal_report is not None:
        findings += _write_report(metal_report, machine)
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            level = click.style(f"{finding.level:4}", fg=_COLOURS[finding.level])
            click.echo(f"{level}  {finding.subject}: {finding.line}")
        click.echo(_summary(findings))
    bad = {"fail", "warn"} if strict else {"fail"}
    return EXIT_FAILED if any(finding.level in bad for finding in findings) else 0


def _write_report(path: Path, machine: Machine) -> list[Finding]:
    """Make a report of the machine alone: a model's name or a worker's address is nobody's business."""

    def progress(title: str) -> None:
        click.echo(f"{title} ...", err=True)

    try:
        report = DeviceReporter(path).make(machine.findings, machine.report, progress)
    except OSError as error:
        return [Finding("fail", "report", f"cannot write {path} ({error.strerror})", "give another FILE")]
    known = [finding.line for finding in machine.findings]
    failed = [Finding("fail", "device", line) for line in report.failed if line not in known]
    advice = "attach it to an issue: drag it into the text of the issue. Nothing was sent"
    return [*failed, Finding("ok", "report", f"the report is in {path.resolve()}", advice)]


def _print_table(paths: tuple[Path, ...]) -> int:
    try:
        click.echo(table_of(read_reports(paths)))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return 0


def _summary(findings: list[Finding]) -> str:
    """One line: what to do, or that there is nothing to do."""
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLOURS}
    if not counts["fail"] and not counts["warn"]:
        return f"all {counts['ok']} findings are ok"
    counted = f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"
    bad = [finding.subject for finding in findings if finding.level != "ok"]
    return f"{counted}: {', '.join(dict.fromkeys(bad))}"


def _worker(target: WorkerTarget) -> list[Finding]:
    try:
        keys = keys_of(target)
    except ConfigError as error:
        return [Finding("fail", "keys", str(error))]
    return list(look_at_worker(target.address, keys, required=target.address is not None))
