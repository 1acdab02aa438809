"""Reports of devices as files: one JSON document each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

FORMAT = "zmqengine report 1"


class Check(msgspec.Struct):
    """The result of one check; `ok` is None for figures without a bound."""

    check: str
    ok: bool | None
    text: str
    figures: dict[str, float] = {}


class CheckGroup(msgspec.Struct):
    """The checks of one process. `end`: how it ended before its last check, with the last lines of its `log`."""

    title: str
    checks: list[Check] = []
    seconds: float = 0.0
    end: str = ""
    log: list[str] = []


class DeviceReport(msgspec.Struct, kw_only=True):
    """The findings and figures of one machine. `findings`: level, subject and text of each line of `doctor`."""

    format: str = FORMAT
    date: str
    zmqengine: str
    system: dict[str, str]
    machine: dict[str, Any] = {}
    findings: list[tuple[str, str, str]] = []
    groups: dict[str, CheckGroup] = {}
    failed: list[str] = []
    seconds: float = 0.0

    def figures(self, group: str, check: str) -> dict[str, float]:
        """Figures of a check; none if it was not made."""
        checks = self.groups[group].checks if group in self.groups else []
        return next((each.figures for each in checks if each.check == check), {})

    def write(self, path: Path) -> None:
        """Replace the file at `path`, which is whole at any time. The home directory is not named in it."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1).decode()
        text = text.replace(str(Path.home()), "~")
        part = path.with_name(path.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def read_reports(paths: Sequence[Path]) -> list[DeviceReport]:
    """The reports in these files. Raises `ValueError` that names a file that is none."""
    reports = []
    for path in paths:
        try:
            report = msgspec.json.decode(path.read_bytes(), type=DeviceReport)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is not a report ({error})") from error
        if report.format != FORMAT:
            raise ValueError(f"{path} is a {report.format!r}, not a {FORMAT!r}")
        reports.append(report)
    return reports
