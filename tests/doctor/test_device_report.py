"""The report of a device: every group of checks in a process of its own, whatever becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from zmqengine.cli.main import zmqengine
from zmqengine.doctor import report_table
from zmqengine.doctor.device_report import PLANS, REPORT_S, DeviceReporter, Plan, check_command
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.machine import Machine
from zmqengine.doctor.report_file import Check, CheckGroup, DeviceReport, read_reports

mx = pytest.importorskip("mlx.core")
buffers = pytest.importorskip("zmqengine.bench.device.buffers")
driving = pytest.importorskip("zmqengine.bench.device.driving")

FINE = json.dumps({"check": "fine", "ok": True, "text": "as it should be | quite"})
WRONG = json.dumps({"check": "wrong", "ok": False, "text": "off by 7"})
FIGURE = json.dumps({"check": "figure", "ok": None, "text": "42", "figures": {"ms": 42.0}})


def program(*lines: str, end: str = "") -> Sequence[str]:
    said = "".join(f"print({line!r}, flush=True)\n" for line in lines)
    return (sys.executable, "-c", f"import os, sys, time\n{said}{end}")


def made(path: Path, end: str, *, seconds: float = 120.0) -> DeviceReport:
    """A report whose groups are fine but for one."""

    def command(group: str, directory: Path) -> Sequence[str]:
        assert directory.is_dir()
        return program(FINE, WRONG, end=end) if group == "margins" else program("a library", FINE, FIGURE)

    found = [Finding("ok", "python", "Python"), Finding("fail", "macos", "macOS 13", "update it")]
    reporter = DeviceReporter(path, command=command, seconds=seconds)
    reporter.make(found, {"device_name": "Apple M9", "metal": True}, lambda title: None)
    (read,) = read_reports([path])
    return read


def test_a_report_has_every_group_and_ends_with_what_failed(tmp_path: Path) -> None:
    """Findings of the machine too; figures without a bound are neither. Other words of a process are passed over."""
    report = made(tmp_path / "r.json", "")
    assert report.failed == ["macOS 13: update it", "margins: wrong: off by 7"]
    assert list(report.groups) == list(PLANS)
    others = [group for name, group in report.groups.items() if name != "margins"]
    assert [[check.check for check in group.checks] for group in others] == [["fine", "figure"]] * len(others)
    assert report.figures("steps", "figure") == {"ms": 42.0}
    assert report.machine["device_name"] == "Apple M9"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.stderr.write('[METAL] Command buffer execution failed\\n'); sys.exit(1)", "ended with code 1"),
        ("os.kill(os.getpid(), 9)", "ended with code -9"),
        ("raise RuntimeError('[METAL] Command buffer execution failed')", "ended with code 1"),
    ],
)
def test_a_group_that_dies_is_a_finding_and_the_others_run(tmp_path: Path, end: str, told: str) -> None:
    """With the last lines of its log."""
    report = made(tmp_path / "r.json", end)
    assert len(report.failed) == 3
    assert told in report.failed[-1]
    assert report.groups["architectures"].checks
    log = "".join(report.groups["margins"].log)
    assert ("Command buffer execution failed" in log) == ("METAL" in end)


@pytest.mark.process
def test_a_report_ends_in_time_whatever_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may hang for good: the group is cut, what it had found stays, and time that is left is for the next."""
    monkeypatch.setattr(
        "zmqengine.doctor.device_report.PLANS",
        {"margins": Plan("Margins", 8.0), "steps": Plan("Steps", 30.0), "pauses": Plan("Pauses", 30.0)},
    )
    report = made(tmp_path / "r.json", "time.sleep(600)")
    assert report.groups["margins"].end == "cut after 8 s"
    assert [check.check for check in report.groups["margins"].checks] == ["fine", "wrong"]
    assert report.groups["pauses"].end == ""
    assert (
        made(tmp_path / "r.json", "time.sleep(600)", seconds=2.0).groups["pauses"].end.startswith("not begun")
    )


def test_the_groups_of_a_report_take_five_minutes_at_most() -> None:
    """With what `doctor` looks at before. Each has time, if the ones before take theirs."""
    before = [plan.seconds for plan in list(PLANS.values())[:-1]]
    assert sum(before) < REPORT_S < 300


def test_each_result_is_in_the_file_before_the_next_check(tmp_path: Path) -> None:
    """A kernel panic leaves what was found before it."""
    path = tmp_path / "r.json"
    wait = f"while 'off by 7' not in open({str(path)!r}).read(): time.sleep(0.01)\n"
    assert made(path, f"\n{wait}sys.exit(5)").failed[-1].startswith("margins ended with code 5")


def test_a_report_does_not_name_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for everybody to read. Nor where MLX is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = json.dumps({"check": "where", "ok": None, "text": f"in {tmp_path}/models"})
    reporter = DeviceReporter(tmp_path / "r.json", command=lambda *_: program(name))
    report = reporter.make([], {"origin": {"path": "/opt/mlx", "packages": {}}}, lambda title: None)
    assert report.machine == {"origin": {"packages": {}}}
    assert str(tmp_path) not in (tmp_path / "r.json").read_text()
    assert "in ~/models" in (tmp_path / "r.json").read_text()


def test_the_command_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where, and how to attach it; code 1 if a check failed, or if the path cannot be written."""
    monkeypatch.setenv("ZMQENGINE_DIR", str(tmp_path / "d"))
    monkeypatch.setattr("zmqengine.cli.commands.doctor.look_at_machine", lambda: Machine([], 8 << 30, {}))
    line = FINE

    def reporter(path: Path) -> DeviceReporter:
        return DeviceReporter(path, command=lambda group, directory: program(line))

    monkeypatch.setattr("zmqengine.cli.commands.doctor.DeviceReporter", reporter)
    monkeypatch.chdir(tmp_path)
    code, output = doctor("--metal-report")
    assert code == 0
    assert f"the report is in {tmp_path}/zmqengine-report.json: attach it to an issue" in output
    line = WRONG
    assert doctor("--metal-report", "other.json")[0] == 1
    code, output = doctor("--metal-report", str(tmp_path / "none" / "r.json"))
    assert code == 1
    assert "cannot write" in output
    code, output = doctor("zmqengine-report.json", "other.json")
    assert (code, output.count("\n")) == (0, 2 + len(report_table._ROWS))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(click.UsageError, match=r"other\.json is not a report"):
        doctor("other.json")


def doctor(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(zmqengine, ["doctor", *arguments], standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception
    return int(ended.return_value), ended.output


def test_a_table_names_the_better_choice_on_each_machine() -> None:
    """A figure that was not measured leaves its cell empty."""
    whole = DeviceReport(
        date="2026-12-01 10:00 CET", zmqengine="0.1.0", system={"macos": "26.4"},
        machine={"device_name": "Apple M4", "metal": True, "system_bytes": 16 << 30, "mlx": "0.32.4"},
        failed=["margins: slow"],
    )  # fmt: skip
    figures = {
        "chats": {
            "1 users, zmqengine": {"tokens_per_s": 100.0},
            "1 users, mlx_lm.server": {"tokens_per_s": 80.0},
            "4 users, zmqengine": {"tokens_per_s": 200.0},
        },
        "buffers": {
            "50 operations, 50 MB": {"ms a step of 1 row": 5.0, "ms a step of 8 rows": 9.0},
            "200 operations, 100000 MB": {"ms a step of 1 row": 4.0, "ms a step of 8 rows": 10.0},
        },
        "kernels": {
            "8 rows": {"us of MLX's operations": 30.0, "us of the kernel": 20.0},
            "1 row": {"us of MLX's operations": 30.0, "us of the kernel": 40.0},
        },
    }
    for group, checks in figures.items():
        whole.groups[group] = CheckGroup(
            group, [Check(name, None, "", found) for name, found in checks.items()]
        )
    empty = DeviceReport(date="", zmqengine="0.1.0", system={"system": "Linux 6 x86_64"})
    empty.groups["pauses"] = CheckGroup("Pauses", end="cut after 3 s")
    lines = report_table.table_of([whole, empty]).splitlines()
    table = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in lines)
    }
    assert table[""] == ["Apple M4, 16 GB", "Linux 6 x86_64, 0 GB, NO MLX as on Metal"]
    assert table["chats of 1, 4, 8 users: tokens/s (mlx_lm.server)"] == ["100 (x0.80), 200", ""]
    (buffers,) = (cells for name, cells in table.items() if "of a buffer" in name)
    assert buffers == ["200/100000: 1.25x; 50/50: 1.11x", ""]
    assert table["kernels for Metal against MLX's operations"] == ["MLX: 0.75 to 1.50x", ""]
    assert table["failed or cut"] == ["margins: slow", "pauses cut after 3 s"]


def test_the_page_of_reports_has_the_table_of_the_kept_ones() -> None:
    """`zmqengine doctor docs/mac-reports/*.json` prints it."""
    pages = Path(report_table.__file__).parents[2] / "docs"
    reports = read_reports(sorted((pages / "mac-reports").glob("*.json")))
    assert report_table.table_of(reports) in (pages / "mac-reports.md").read_text()


def test_an_operation_that_differs_from_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one shape of one type; and one that raises."""
    from zmqengine.bench.device import operations

    real, calls = mx.fast.rms_norm, []

    def wrong(array, weight, eps):
        calls.append(array.dtype)
        return real(array, weight, eps) * (1.5 if len(calls) == 3 else 1)

    monkeypatch.setattr(mx.fast, "rms_norm", wrong)
    norms = operations._all("norms", operations._norms())
    assert norms.ok is False
    assert norms.text.count("off by 0.5") == 2  # as the worst of all, and by name
    monkeypatch.setattr(operations, "_write", lambda *_: mx.array([1]) + "no")
    writes = operations._all("writes", operations._writes(), exact=True)
    assert writes.ok is False
    assert "Error" in writes.text


@pytest.mark.parametrize("listed", [True, False])
def test_a_power_assertion_is_looked_for_where_macos_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """One that pmset does not list while it is held is a fault."""
    from zmqengine.bench.device import pauses

    class Assertion:
        description = "held"

        def hold(self) -> None:
            if listed:
                (tmp_path / "listed").write_text(
                    f"   pid {os.getpid()}(python): PreventUserIdleSystemSleep\n"
                )

        def release(self) -> None:
            (tmp_path / "listed").unlink(missing_ok=True)

    pmset = tmp_path / "pmset"
    pmset.write_text(f"#!/bin/sh\necho 'pid 1(launchd): other'\ncat {tmp_path}/listed 2>/dev/null\nexit 0\n")
    pmset.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(pauses, "power_assertion", lambda wanted: Assertion())
    verdict = pauses._assertion()
    assert verdict.ok is listed
    assert ("PreventUserIdleSystemSleep" in verdict.text) == listed


def test_a_row_with_other_tokens_than_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that raises is a finding of its own; the others are checked."""
    from zmqengine.bench.device import architectures
    from zmqengine.bench.models.small_models import ARCHITECTURES

    few = {name: ARCHITECTURES[name] for name in ("llama", "mamba")}
    monkeypatch.setattr(architectures, "ARCHITECTURES", {**few, "broken": {"model_type": "no such model"}})
    assert [(each.check, each.ok) for each in architectures.check(tmp_path)] == [
        ("llama", True), ("mamba", True), ("broken", False),
    ]  # fmt: skip
    monkeypatch.setattr(architectures, "_alone", lambda model, prompt: [1] * 8)
    (llama, *_) = architectures.check(tmp_path)
    assert llama.ok is False
    assert "other tokens than alone" in llama.text


@pytest.mark.process
def test_a_grid_of_bounds_of_command_buffers_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair in a process that has it in its environment; one that the device does not bear is a line too."""
    seen, ran = [], subprocess.run

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        pair = env["MLX_MAX_OPS_PER_BUFFER"], env["MLX_MAX_MB_PER_BUFFER"]
        seen.append(pair)
        if len(seen) == 1:
            return ran(command, env=env, **options)
        found = json.dumps({"ms a step of 1 row": 4.5, "tokens/s of a prompt": 1000.0})
        fails = pair == ("400", "100000")
        if pair == ("400", "200"):
            raise subprocess.TimeoutExpired(command, 30)
        return subprocess.CompletedProcess(command, int(fails), found, "x\nGPU Timeout" if fails else "")

    monkeypatch.setattr(buffers.subprocess, "run", run)
    monkeypatch.setattr(driving, "CPU_SHAPE", "0.2m")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    first, *others = buffers.check(tmp_path)
    assert seen == [(str(one), str(other)) for one in buffers.OPERATIONS for other in buffers.MEGABYTES]
    assert list(first.figures) == ["ms a step of 1 row", "ms a step of 8 rows", "tokens/s of a prompt"]
    assert [each.text for each in others] == [
        "ms a step of 1 row: 4.50; tokens/s of a prompt: 1000.00"
    ] * 6 + [
        "not done in 30 s",
        "ended with code 1: GPU Timeout",
    ]
    assert others[0].figures == {"ms a step of 1 row": 4.5, "tokens/s of a prompt": 1000.0}
    assert {each.ok for each in (first, *others)} == {None}


SHORT = """
import sys
from zmqengine.bench.device.__main__ import main
from zmqengine.bench.device import architectures, chats, driving, margins, operations, pauses, steps
kinds = ("llama", "sliding window", "mamba", "falcon_h1", "deepseek_v2")
architectures.ARCHITECTURES = {kind: architectures.ARCHITECTURES[kind] for kind in kinds}
driving.CPU_SHAPE = "0.2m"
margins._CPU_TOKENS = 600
operations._WIDTH, operations._VOCABULARY = 64, 2000
pauses._PAUSE_S, pauses._REPEATS = 0.5, 1
steps._CPU_TOKENS = 300
chats.USERS, chats.SECONDS = (1,), 1.0
sys.exit(main())
"""


def short_command(group: str, directory: Path) -> Sequence[str]:
    """The checks of a group on smaller models, and an architecture of each kind of cache; one group as it is."""
    command = (sys.executable, "-c", SHORT, group, str(directory))
    return check_command(group, directory) if group == "residency" else command


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_of_this_machine_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end, on whatever device computes here. $ZMQENGINE_WHOLE_REPORT is for the checks as a Mac runs them."""
    is_whole = bool(os.environ.get("ZMQENGINE_WHOLE_REPORT"))
    if not is_whole:
        # A loaded machine takes longer.
        monkeypatch.setattr(
            "zmqengine.doctor.device_report.PLANS", {name: Plan(name, 200.0) for name in PLANS}
        )
    seconds = REPORT_S if is_whole else 1000.0
    reporter = DeviceReporter(
        tmp_path / "r.json", command=check_command if is_whole else short_command, seconds=seconds
    )
    report = reporter.make([], None, lambda title: None)
    assert report.failed == []
    assert [group.end for group in report.groups.values()] == [""] * len(PLANS)
    numbers = {name: len(group.checks) for name, group in report.groups.items()}
    architectures = numbers.pop("architectures")
    assert architectures > 20 if is_whole else architectures == 5
    pairs = len(buffers.OPERATIONS) * len(buffers.MEGABYTES) if mx.metal.is_available() else 1
    chats = 6 if is_whole else 2
    cases = 8 if mx.metal.is_available() else 1
    assert numbers == {
        "operations": 6, "chats": chats, "steps": 4, "kernels": cases, "buffers": pairs,
        "residency": 2, "pauses": 3, "margins": 3
    }  # fmt: skip
    assert all(
        check.figures for name in ("chats", "steps", "buffers") for check in report.groups[name].checks
    )
    (read,) = read_reports([tmp_path / "r.json"])
    assert report_table.table_of([read])
