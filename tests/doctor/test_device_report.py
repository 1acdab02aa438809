"""The report of a device: every group of checks in a process of its own, whatever becomes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zmqengine.cli.main import zmqengine
from zmqengine.doctor.device_report import GROUPS, check_command, write_report
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.machine import Machine

mx = pytest.importorskip("mlx.core")
buffers = pytest.importorskip("zmqengine.bench.device.buffers")
driving = pytest.importorskip("zmqengine.bench.device.driving")

FINE = json.dumps({"check": "fine", "ok": True, "text": "as it should be | quite"})
WRONG = json.dumps({"check": "wrong", "ok": False, "text": "off by 7"})
FIGURE = json.dumps({"check": "figure", "ok": None, "text": "42"})


def program(*lines: str, end: str = "") -> Sequence[str]:
    said = "".join(f"print({line!r}, flush=True)\n" for line in lines)
    return (sys.executable, "-c", f"import os, sys, time\n{said}{end}")


def report(path: Path, end: str, *, timeout_s: float = 60.0) -> tuple[list[str], str]:
    """A report whose groups are fine but for one; what failed, and the text."""

    def command(group: str) -> Sequence[str]:
        return program(FINE, WRONG, end=end) if group == "margins" else program(FINE, FIGURE)

    found = [Finding("ok", "python", "Python"), Finding("fail", "macos", "macOS 13", "update it")]
    failed = write_report(path, found, lambda title: None, command=command, timeout_s=timeout_s)
    return failed, path.read_text()


def test_a_report_has_every_group_and_ends_with_what_failed(tmp_path: Path) -> None:
    """Findings of the machine too; figures without a bound are neither."""
    failed, text = report(tmp_path / "r.md", "")
    assert failed == ["macOS 13: update it", "margins: wrong: off by 7"]
    assert all(f"## {title}" in text for title in GROUPS.values())
    assert text.count("| ok | fine | as it should be \\| quite |") == len(GROUPS)
    assert text.count("| - | figure | 42 |") == len(GROUPS) - 1
    assert text.endswith("## Failed\n\n- macOS 13: update it\n- margins: wrong: off by 7\n")


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
    failed, text = report(tmp_path / "r.md", end)
    assert len(failed) == 3
    assert told in failed[-1]
    assert "| ok | fine" in text.split("## Sleep and pauses")[1]
    assert ("Command buffer execution failed" in text) == ("METAL" in end)


def test_a_group_that_hangs_is_ended(tmp_path: Path) -> None:
    """A GPU may hang for good."""
    failed, text = report(tmp_path / "r.md", "time.sleep(600)", timeout_s=3.0)
    assert "margins was ended after" in failed[-1]
    assert "| fail | wrong | off by 7 |" in text


def test_each_result_is_in_the_file_before_the_next_check(tmp_path: Path) -> None:
    """A kernel panic leaves what was found before it."""
    path = tmp_path / "r.md"
    peek = f"sys.exit(0 if '| fail | wrong' in open({str(path)!r}).read() else 5)"
    wait = f"\nwhile 'wrong' not in open({str(path)!r}).read(): time.sleep(0.01)\n"
    failed, _ = report(path, wait + peek)
    assert len(failed) == 2


def test_the_command_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 1 if a check failed; a path that cannot be written is a finding."""
    monkeypatch.setenv("ZMQENGINE_DIR", str(tmp_path / "d"))
    monkeypatch.setattr("zmqengine.cli.commands.doctor.look_at_machine", lambda: Machine([], 8 << 30))
    fine = partial(write_report, command=lambda group: program(FINE))
    monkeypatch.setattr("zmqengine.cli.commands.doctor.write_report", fine)
    monkeypatch.chdir(tmp_path)

    def doctor(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(zmqengine, ["doctor", *arguments], standalone_mode=False)
        assert ended.exception is None, ended.exception
        return int(ended.return_value), ended.output

    code, output = doctor("--metal-report")
    assert code == 0
    assert "the report is in zmqengine-report.md" in output
    assert "Nothing failed." in (tmp_path / "zmqengine-report.md").read_text()
    code, output = doctor("--metal-report", str(tmp_path / "none" / "r.md"))
    assert code == 1
    assert "cannot write" in output


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


def test_a_row_with_other_tokens_than_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that raises is a finding of its own; the others are checked."""
    from zmqengine.bench.device import architectures
    from zmqengine.bench.models.small_models import ARCHITECTURES

    few = {name: ARCHITECTURES[name] for name in ("llama", "mamba")}
    monkeypatch.setattr(architectures, "ARCHITECTURES", {**few, "broken": {"model_type": "no such model"}})
    assert [(each.check, each.ok) for each in architectures.check()] == [
        ("llama", True), ("mamba", True), ("broken", False),
    ]  # fmt: skip
    monkeypatch.setattr(architectures, "_alone", lambda model, prompt: [1] * 8)
    (llama, *_) = architectures.check()
    assert llama.ok is False
    assert "other tokens than alone" in llama.text


def test_a_grid_of_bounds_of_command_buffers_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair in a process that has it in its environment; one that the device does not bear is a line too."""
    seen, ran = [], subprocess.run

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        pair = env["MLX_MAX_OPS_PER_BUFFER"], env["MLX_MAX_MB_PER_BUFFER"]
        seen.append(pair)
        if len(seen) == 1:
            return ran(command, env=env, **options)
        found = json.dumps({"1 rows, ms a step": 4.5, "prefill, tokens/s": 1000.0})
        fails = pair == ("400", "100000")
        return subprocess.CompletedProcess(command, int(fails), found, "x\nGPU Timeout" if fails else "")

    monkeypatch.setattr(buffers.subprocess, "run", run)
    monkeypatch.setattr(driving, "CPU_SHAPE", "0.2m")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    first, *others = buffers.check()
    assert seen == [(str(one), str(other)) for one in buffers.OPERATIONS for other in buffers.MEGABYTES]
    assert re.fullmatch(
        r"1 rows, ms a step [\d.]+; 8 rows, ms a step [\d.]+; prefill, tokens/s [\d.]+", first.text
    )
    assert [each.text for each in others] == ["1 rows, ms a step 4.50; prefill, tokens/s 1000.00"] * 7 + [
        "ended with code 1: GPU Timeout"
    ]
    assert {each.ok for each in (first, *others)} == {None}


SHORT = """
import sys
from zmqengine.bench.device.__main__ import main
from zmqengine.bench.device import architectures, driving, margins, operations, pauses
kinds = ("llama", "sliding window", "mamba", "falcon_h1", "deepseek_v2")
architectures.ARCHITECTURES = {kind: architectures.ARCHITECTURES[kind] for kind in kinds}
driving.CPU_SHAPE = "0.2m"
margins._CPU_TOKENS = 600
operations._WIDTH, operations._VOCABULARY = 64, 2000
pauses._PAUSE_S, pauses._REPEATS = 0.5, 1
sys.exit(main())
"""


def short_command(group: str) -> Sequence[str]:
    """The checks of a group on smaller models, and an architecture of each kind of cache; one group as it is."""
    return check_command(group) if group == "residency" else (sys.executable, "-c", SHORT, group)


@pytest.mark.slow
def test_the_report_of_this_machine_is_whole(tmp_path: Path) -> None:
    """End to end, on whatever device computes here. $ZMQENGINE_WHOLE_REPORT is for the checks as a Mac runs them."""
    is_whole = bool(os.environ.get("ZMQENGINE_WHOLE_REPORT"))
    command = check_command if is_whole else short_command
    failed = write_report(tmp_path / "r.md", [], lambda title: None, command=command)
    text = (tmp_path / "r.md").read_text()
    assert failed == []
    assert text.count("the same tokens, twice") == (21 if is_whole else 5)
    # The number of results of each group.
    groups = [part.count("\n| ok |") + part.count("\n| - |") for part in text.split("\n## ")[2:-1]]
    pairs = len(buffers.OPERATIONS) * len(buffers.MEGABYTES) if mx.metal.is_available() else 1
    assert groups == [6, 21 if is_whole else 5, 2, pairs, 3, 3, 4]
    assert "mlx-lm" in text.split("## Speed against mlx-lm")[1]
