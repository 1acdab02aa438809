"""Makes a report of this machine's device: findings, and checks of the engine on it.

Each group of checks runs in a process of its own, and each result is on the disk before the next one: what ends a
process, or the machine, leaves a file that says how far it came. Nothing is asked and nothing is sent.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import zmqengine
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.report_file import Check, CheckGroup, DeviceReport
from zmqengine.python_child import python_command, python_environment

REPORT_S = 290.0
"""Time-out of all groups together: with what `doctor` looks at before, the report takes at most 5 minutes."""


class Plan(NamedTuple):
    """A group of checks, and its seconds: what a small Mac needs, with a margin."""

    title: str
    seconds: float


PLANS = {
    "operations": Plan("Operations against the CPU", 25),
    "chats": Plan("Chats of unlike users, as in README", 75),
    "steps": Plan("Verify blocks, pieces of prompts and chunks", 30),
    "kernels": Plan("Kernels for Metal against MLX's operations", 15),
    "buffers": Plan("Command buffers: bounds on their operations and their size", 65),
    "residency": Plan("Wired memory", 15),
    "pauses": Plan("Sleep, pauses and a GPU that is kept warm", 30),
    "margins": Plan("Margins to the GPU watchdog", 20),
    "architectures": Plan("Families: rows together against a row alone, logits against the CPU", 60),
}
"""The most wanted first: what time does not suffice for is cut at the end."""
_LOG_LINES = 30

Command = Callable[[str, Path], Sequence[str]]


def check_command(group: str, directory: Path) -> Sequence[str]:
    """The process that runs a group of checks, with models in `directory`."""
    return python_command("zmqengine.bench.device", group, str(directory))


class DeviceReporter:
    """Makes one report at `path`. Time that a group leaves is the next one's."""

    def __init__(self, path: Path, *, command: Command = check_command, seconds: float = REPORT_S) -> None:
        self._path = path
        self._command = command
        self._started_s = time.monotonic()
        self._until_s = self._started_s + seconds
        self.report = DeviceReport(
            date=time.strftime("%Y-%m-%d %H:%M %Z"), zmqengine=zmqengine.__version__, system=_system()
        )

    def make(
        self, findings: Sequence[Finding], machine: dict[str, Any] | None, progress: Callable[[str], None]
    ) -> DeviceReport:
        """Run all groups and return the report. Raises `OSError` for an unusable path."""
        report = self.report
        report.machine = _without_paths(machine or {})
        report.findings = [(each.level, each.subject, each.line) for each in findings]
        report.failed = [finding.line for finding in findings if finding.level == "fail"]
        self._write()
        with tempfile.TemporaryDirectory(prefix="zmqengine-report-") as directory:
            until_s = self._started_s
            for name, plan in PLANS.items():
                group = report.groups[name] = CheckGroup(plan.title)
                until_s = min(until_s + plan.seconds, self._until_s)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    group.end = "not begun: no time was left"
                else:
                    progress(f"{plan.title}, at most {left_s:.0f} s")
                    self._run(name, group, self._command(name, Path(directory)), left_s)
                self._write()
        return report

    def _run(self, name: str, group: CheckGroup, command: Sequence[str], timeout_s: float) -> None:
        started_s = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                command, env=python_environment(), stdout=subprocess.PIPE, stderr=log, text=True
            )
            ender = threading.Timer(timeout_s, process.kill)
            ender.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self._note(name, group, line)
                code = process.wait()
            finally:
                ender.cancel()
                process.kill()
                process.wait()
            group.seconds = round(time.monotonic() - started_s, 1)
            if not code:
                return
            log.seek(0)
            group.log = [line.rstrip() for line in log.readlines()[-_LOG_LINES:]]
        if group.seconds >= timeout_s:
            group.end = f"cut after {timeout_s:.0f} s"
        else:
            group.end = f"ended with code {code} after {group.seconds:.0f} s"
            self.report.failed.append(f"{name} {group.end}")

    def _note(self, name: str, group: CheckGroup, line: str) -> None:
        try:
            check = msgspec.json.decode(line, type=Check)
        except msgspec.DecodeError:
            # A library's own words.
            return
        group.checks.append(check)
        if check.ok is False:
            self.report.failed.append(f"{name}: {check.check}: {check.text}")
        self._write()

    def _write(self) -> None:
        self.report.seconds = round(time.monotonic() - self._started_s, 1)
        self.report.write(self._path)


def _without_paths(machine: dict[str, Any]) -> dict[str, Any]:
    origin = machine.get("origin", {})
    return {**machine, "origin": {name: fact for name, fact in origin.items() if name != "path"}}


def _system() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "macos": platform.mac_ver()[0],
        "python": platform.python_version(),
    }
