"""Memory pressure of this machine and of the container, read about once a second.

Memory that a GPU shares with the system is neither swapped nor compressed, so a worker that fills it up takes the
machine down: macOS panics without free pages (github.com/jundot/omlx/issues/3065), Linux kills.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Level = Literal["normal", "warning", "critical"]
"""`warning`: hold less memory for speed. `critical`: start no request; the system is about to kill processes."""

STALLED_WARNING, STALLED_CRITICAL = 10.0, 30.0
"""Percent of the last 10 s in which all tasks waited for memory. systemd-oomd kills at 60 by default (oomd.conf)."""
USED_WARNING, USED_CRITICAL = 0.9, 0.95
"""Share of a control group's limit in use, without reclaimable memory; at 1 the kernel kills."""
_SYSCTL = b"kern.memorystatus_vm_pressure_level"
# Values of the sysctl, as DISPATCH_MEMORYPRESSURE_WARN and _CRITICAL; 1 is normal.
_MACOS_WARNING, _MACOS_CRITICAL = 2, 4

Source = Callable[[], Level]


def pressure_source(root: Path = Path("/")) -> Source:
    """A function that reads this system's pressure. It takes some 50 microseconds and never raises."""
    if sys.platform == "darwin":
        sysctl = ctypes.CDLL(None).sysctlbyname
        return lambda: _of_macos(_read_sysctl(sysctl))
    groups = _control_groups(root)
    return lambda: _of_linux(root, groups)


def _of_macos(level: int) -> Level:
    if level >= _MACOS_CRITICAL:
        return "critical"
    return "warning" if level >= _MACOS_WARNING else "normal"


def _read_sysctl(sysctl: Callable[..., int]) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = sysctl(_SYSCTL, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def _of_linux(root: Path, groups: list[Path]) -> Level:
    stalled = _stalled(root / "proc/pressure/memory")
    used = max((_used(group) for group in groups), default=0.0)
    if stalled >= STALLED_CRITICAL or used >= USED_CRITICAL:
        return "critical"
    return "warning" if stalled >= STALLED_WARNING or used >= USED_WARNING else "normal"


def _stalled(path: Path) -> float:
    """Pressure stall information (Documentation/accounting/psi.rst); 0 where the kernel has none."""
    try:
        match = re.search(r"^full avg10=([\d.]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(match[1]) if match else 0.0


def _control_groups(root: Path) -> list[Path]:
    """The control group of this process and those above it (version 2), as far as they have a limit."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return [group for group in _upwards(base / own, base) if (group / "memory.max").exists()]


def _upwards(group: Path, base: Path) -> Iterator[Path]:
    yield group
    while group != base:
        group = group.parent
        yield group


def _used(group: Path) -> float:
    """Used share of a group's limit. Its inactive file cache counts as free."""
    try:
        limit = int((group / "memory.max").read_text())
        current = int((group / "memory.current").read_text())
        reclaimable = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        # No limit ("max"), or the group is gone.
        return 0.0
    return (current - (int(reclaimable[1]) if reclaimable else 0)) / max(1, limit)
