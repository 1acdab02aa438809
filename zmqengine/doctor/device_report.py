"""A report of this machine's device, as one file to attach to an issue: findings, and checks of the engine on it.

Each group of checks runs in a process of its own, and each result is on the disk before the next one: what ends a
process, or the machine, leaves a file that says how far it came.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import zmqengine
from zmqengine.doctor.finding import Finding
from zmqengine.python_child import python_command, python_environment

GROUPS = {
    "operations": "Operations against the CPU",
    "architectures": "Architectures: rows together against a row alone, logits against the CPU",
    "residency": "Wired memory",
    "buffers": "Command buffers: bounds on their operations and their size",
    "margins": "Margins to the GPU watchdog",
    "pauses": "Sleep and pauses",
    "speed": "Speed against mlx-lm",
}
GROUP_S = 900.0
"""Time-out of one group on a slow machine."""
_LOG_LINES = 30

Command = Callable[[str], Sequence[str]]


def check_command(group: str) -> Sequence[str]:
    """The process that runs a group of checks."""
    return python_command("zmqengine.bench.device", group)


def write_report(
    path: Path,
    findings: Sequence[Finding],
    progress: Callable[[str], None],
    *,
    command: Command = check_command,
    timeout_s: float = GROUP_S,
) -> list[str]:
    """Write the report to `path`; returns what failed, one line each. Raises `OSError` for an unusable path."""
    with path.open("w", encoding="utf-8") as file:
        _put(file, _head())
        failed = [finding.line for finding in findings if finding.level == "fail"]
        _put(file, _table("Machine", ((each.level, each.subject, each.line) for each in findings)))
        for group, title in GROUPS.items():
            progress(title)
            failed += _run_group(file, group, title, command(group), timeout_s)
        failures = "\n".join(f"- {line}" for line in failed) or "Nothing failed."
        _put(file, f"\n## Failed\n\n{failures}\n")
    return failed


def _run_group(
    file: TextIO, group: str, title: str, command: Sequence[str], timeout_s: float
) -> Iterator[str]:
    _put(file, _table(title, ()))
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
                verdict: dict[str, Any] = json.loads(line)
                level = {True: "ok", False: "fail", None: "-"}[verdict["ok"]]
                _put(file, _row(level, verdict["check"], verdict["text"]))
                if level == "fail":
                    yield f"{group}: {verdict['check']}: {verdict['text']}"
            code = process.wait()
        finally:
            ender.cancel()
            process.kill()
            process.wait()
        seconds = time.monotonic() - started_s
        _put(file, f"\n{seconds:.0f} s\n")
        if code:
            log.seek(0)
            last = "".join(log.readlines()[-_LOG_LINES:])
            how = "was ended after" if seconds >= timeout_s else f"ended with code {code} after"
            yield f"{group} {how} {seconds:.0f} s"
            _put(file, f"\nThe process {how} {seconds:.0f} s:\n\n```\n{last}```\n")


def _head() -> str:
    facts = {
        "zmqengine": zmqengine.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "macOS": platform.mac_ver()[0] or "no",
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }
    lines = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    return f"# Device report of zmqengine\n\n{lines}\n"


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> str:
    return f"\n## {title}\n\n| | | |\n|---|---|---|\n" + "".join(_row(*row) for row in rows)


def _row(level: str, name: str, text: str) -> str:
    cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in (level, name, text))
    return f"| {' | '.join(cells)} |\n"


def _put(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
