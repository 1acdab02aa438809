"""Findings of a Mac: macOS against the chip and against MLX's wheel, and the origin of MLX.

Wheels for macOS 26.0 were built for 26.2 and miscompute on M5 before it; builds of Homebrew and from source have
miscompiled or lacked the M5's matrix units (github.com/ml-explore/mlx/issues/4525, 3951, 3586, 3593). Whether one does,
its products tell (`machine_report.product_errors`): the origin is a fact for whoever asks, and no fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from zmqengine.doctor.finding import Finding

MACOS_MIN = (14, 0)
"""The oldest that MLX has wheels for."""
MACOS_M5_MIN = (26, 2)
"""The first with the M5's matrix units in Metal."""
_RESERVED_SHARE, _RESERVED_BYTES = 0.2, 6 << 30
"""The larger of the two is left to the system: GPU memory is neither swapped nor compressed, and macOS panics without
free pages (github.com/jundot/omlx/issues/3065)."""
_PYPI = "pip install --force-reinstall mlx from PyPI"


def look_at_mac(report: dict[str, Any]) -> Iterator[Finding]:
    """Look at macOS, the chip, MLX's origin and the limit on wired memory. Nothing for a machine without Metal."""
    if not report["metal"]:
        return
    yield from _system(_numbers(str(report["macos"])), str(report["device_name"]))
    yield from _origin(report["origin"], _numbers(str(report["macos"])))
    yield from _wired(int(report["system_bytes"]), int(report["recommended_bytes"]))


def releases_differ(packages: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """A finding if MLX's packages are of different releases, on any system."""
    parts = {name: each["version"] for name, each in packages.items() if name != "mlx-lm"}
    if len(set(parts.values())) > 1:
        releases = ", ".join(f"{name} {version}" for name, version in parts.items())
        yield Finding(
            "fail", "mlx parts", releases, "they have to be of one release: pip install --upgrade mlx"
        )


def _system(macos: tuple[int, ...], chip: str) -> Iterator[Finding]:
    text = f"macOS {_dotted(macos)} on {chip}"
    if macos < MACOS_MIN:
        yield Finding("fail", "macos", text, f"MLX needs macOS {_dotted(MACOS_MIN)} or newer")
    elif "M5" in chip and macos < MACOS_M5_MIN:
        advice = f"update to {_dotted(MACOS_M5_MIN)} or newer: before it MLX may compute wrongly on M5"
        yield Finding("warn", "macos", text, advice)
    else:
        yield Finding("ok", "macos", text)


def _origin(origin: dict[str, Any], macos: tuple[int, ...]) -> Iterator[Finding]:
    path, package = str(origin["path"]), origin["packages"].get("mlx-metal") or origin["packages"].get("mlx")
    installed = f"MLX in {path}"
    if package is None or package["source"]:
        yield Finding("ok", "mlx origin", f"{installed} was built from source; its products are right")
        return
    if "/Cellar/" in path or package["installer"] in ("brew", "conda"):
        text = f"{installed} is from {package['installer'] or 'Homebrew'}; its products are right"
        yield Finding("ok", "mlx origin", text)
        return
    built_for = re.search(r"macosx_(\d+)_(\d+)", package["tag"])
    if built_for is not None and macos < (int(built_for[1]), int(built_for[2])):
        text = f"{installed} is built for macOS {built_for[1]}.{built_for[2]}, this is {_dotted(macos)}"
        yield Finding("fail", "mlx origin", text, _PYPI)
    else:
        yield Finding("ok", "mlx origin", f"{installed}, {package['tag'] or 'no platform tag'}")


def _wired(whole_bytes: int, limit_bytes: int) -> Iterator[Finding]:
    """Advice on the GPU's share, where more of it is safe."""
    most_bytes = whole_bytes - max(int(whole_bytes * _RESERVED_SHARE), _RESERVED_BYTES)
    text = f"macOS lets the GPU have {limit_bytes / 2**30:.1f}G of {whole_bytes / 2**30:.1f}G"
    if limit_bytes > whole_bytes * (1 - _RESERVED_SHARE):
        advice = (
            f"that leaves the system too little: sudo sysctl iogpu.wired_limit_mb={max(0, most_bytes >> 20)}"
        )
        yield Finding("warn", "wired", text, advice)
    elif limit_bytes < 0.9 * most_bytes:
        advice = (
            f"for larger models, until the next start: sudo sysctl iogpu.wired_limit_mb={most_bytes >> 20}"
        )
        yield Finding("ok", "wired", f"{text}; {advice}")
    else:
        yield Finding("ok", "wired", text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
