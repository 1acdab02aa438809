"""Table of several reports of devices: what each machine measured, and which choice was the better one on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from zmqengine.doctor.report_file import DeviceReport

USERS = (1, 4, 8)
NOT_MEASURED = ""


def table_of(reports: Sequence[DeviceReport]) -> str:
    """A table in Markdown, a column for each report."""
    lines = [_line(["", *map(_machine, reports)]), _line(["---"] * (1 + len(reports)))]
    lines += [_line([name, *map(cell, reports)]) for name, cell in _ROWS]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _machine(report: DeviceReport) -> str:
    machine = report.machine
    name = str(machine.get("device_name") or report.system.get("system", ""))
    gib = int(machine.get("system_bytes", 0)) / 2**30
    device = "" if machine.get("metal") else f", {str(machine.get('device', 'no MLX')).upper()} as on Metal"
    return f"{name}, {gib:.0f} GB{device}"


def _versions(report: DeviceReport) -> str:
    macos = report.system.get("macos", "")
    system = f"macOS {macos}" if macos else report.system.get("system", "").partition(" ")[0]
    return f"{system}, zmqengine {report.zmqengine}, MLX {report.machine.get('mlx', '?')}"


def _chats(measure: str, digits: int) -> Callable[[DeviceReport], str]:
    def cell(report: DeviceReport) -> str:
        shown = []
        for users in USERS:
            here = report.figures("chats", f"{users} users, zmqengine").get(measure)
            there = report.figures("chats", f"{users} users, mlx_lm.server").get(measure)
            if here is not None:
                shown.append(f"{here:.{digits}f}" + (f" (x{there / here:.2f})" if there and here else ""))
        return ", ".join(shown)

    return cell


def _figures_of(report: DeviceReport, group: str, measure: str) -> Iterator[tuple[float, str]]:
    """Figures of a measure, each with the name of its check."""
    for check in report.groups[group].checks if group in report.groups else ():
        if measure in check.figures:
            yield check.figures[measure], check.check


def _buffers(report: DeviceReport) -> str:
    """The fastest pair for one row and for eight, and how much faster it is than the slowest."""
    shown = []
    for measure in ("ms a step of 1 row", "ms a step of 8 rows"):
        found = sorted(_figures_of(report, "buffers", measure))
        if len(found) > 1:
            name = re.sub(r" operations, (\d+) MB", r"/\1", found[0][1])
            shown.append(f"{name}: {found[-1][0] / found[0][0]:.2f}x")
    return "; ".join(shown)


def _warm(report: DeviceReport) -> str:
    figures = report.figures("pauses", "first tokens after a pause")
    if "ms kept warm" not in figures:
        return NOT_MEASURED
    return f"{figures['ms after a pause']:.0f} → {figures['ms kept warm']:.0f}"


def _wired(report: DeviceReport) -> str:
    found = _figures_of(report, "residency", "ms a step of 4 rows")
    return ", ".join(f"{name.removeprefix('--wired-limit ')} {ms:.1f}" for ms, name in found)


def _verify(report: DeviceReport) -> str:
    shown = []
    for rows in (1, 8):
        figures = report.figures("steps", f"verify blocks, rows: {rows}")
        costs = [f"{figures[width]:.2f}" for width in ("2", "4", "8") if width in figures]
        if costs:
            shown.append(f"{rows}: {', '.join(costs)}")
    return "; ".join(shown)


def _pieces(report: DeviceReport) -> str:
    figures = report.figures("steps", "pieces of prompts")
    return ", ".join(f"{size}: {figures[size]:.1f}" for size in ("1", "16", "128", "1024") if size in figures)


def _chunks(report: DeviceReport) -> str:
    figures = report.figures("steps", "chunks")
    return ", ".join(f"{size}: {rate:.0f}" for size, rate in figures.items())


def _kernels(report: DeviceReport) -> str:
    """How many times faster than MLX's operations our kernels are, at least and at most."""
    checks = report.groups["kernels"].checks if "kernels" in report.groups else []
    gains = [
        check.figures["us of MLX's operations"] / check.figures["us of the kernel"]
        for check in checks
        if check.figures.get("us of the kernel")
    ]
    if not gains:
        return NOT_MEASURED
    return f"{'kernel' if min(gains) > 1 else 'MLX'}: {min(gains):.2f} to {max(gains):.2f}x"


def _families(report: DeviceReport) -> str:
    checks = report.groups["architectures"].checks if "architectures" in report.groups else []
    return f"{sum(check.ok is True for check in checks)} of {len(checks)}" if checks else NOT_MEASURED


def _faults(report: DeviceReport) -> str:
    cut = [f"{name} {group.end}" for name, group in report.groups.items() if group.end]
    return "; ".join([*report.failed, *(text for text in cut if text not in report.failed)]) or "none"


_ROWS: tuple[tuple[str, Callable[[DeviceReport], str]], ...] = (
    ("date", lambda report: report.date),
    ("versions", _versions),
    ("chats of 1, 4, 8 users: tokens/s (mlx_lm.server)", _chats("tokens_per_s", 0)),
    ("TTFT p99 ms", _chats("ttft_p99_ms", 0)),
    ("longest silence ms", _chats("silence_max_ms", 0)),
    ("best operations/MB of a buffer for 1 and 8 rows, against the worst", _buffers),
    ("ms of two tokens after 3 s, kept warm", _warm),
    ("wired, ms a step of 4 rows", _wired),
    ("verify blocks of 2, 4, 8 tokens, in steps, by rows", _verify),
    ("ms of a piece of a prompt, by tokens", _pieces),
    ("tokens/s of a prompt, by chunk", _chunks),
    ("kernels for Metal against MLX's operations", _kernels),
    ("families right", _families),
    ("failed or cut", _faults),
)
