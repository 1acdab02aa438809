"""What the doctor finds on a Mac, from reports of Macs that no test has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zmqengine.doctor.macs import look_at_mac, releases_differ

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]


def mac(
    macos: str = "26.2",
    chip: str = "Apple M5 Max",
    *,
    path: str = "/venv/mlx",
    memory: int = 64,
    limit: int = 48,
) -> dict[str, Any]:
    """A Mac's report, as `machine_report` prints it."""
    package = {"version": "0.32.4", "installer": "pip", "tag": "py3-none-macosx_14_0_arm64", "source": ""}
    return {
        "metal": True,
        "macos": macos,
        "device_name": chip,
        "origin": {"path": path, "packages": {"mlx": package, "mlx-metal": dict(package)}},
        "system_bytes": memory * GIB,
        "recommended_bytes": limit * GIB,
    }


def found(report: dict[str, Any], subject: str) -> tuple[str, str]:
    (finding,) = [each for each in look_at_mac(report) if each.subject == subject]
    return finding.level, finding.line


@pytest.mark.parametrize(
    ("macos", "chip", "level"),
    [
        ("26.2", "Apple M5", "ok"),
        ("26.1", "Apple M5", "warn"),
        ("26.0", "Apple M5 Pro", "warn"),
        ("26.0", "Apple M4 Max", "ok"),
        ("15.6.1", "Apple M1", "ok"),
        ("13.7", "Apple M1", "fail"),
        ("27.0", "Apple M6", "ok"),
    ],
)
def test_macos_has_to_suit_the_chip(macos: str, chip: str, level: str) -> None:
    """mlx #3951, #4525: before 26.2 the matrix units of M5 gave wrong results."""
    assert found(mac(macos, chip), "macos")[0] == level


def test_an_mlx_from_elsewhere_than_pypi_is_judged_by_its_products() -> None:
    """mlx #3586, #3593: builds of Homebrew and from source have miscompiled; those that compute rightly are told as
    they are. A wheel for a newer macOS fails."""
    assert found(mac(), "mlx origin")[0] == "ok"
    brewed = found(mac(path="/opt/homebrew/Cellar/mlx/0.32.4/mlx"), "mlx origin")
    assert (brewed[0], "products are right" in brewed[1]) == ("ok", True)
    report = mac()
    report["origin"]["packages"]["mlx-metal"]["source"] = "a checkout"
    assert found(report, "mlx origin")[0] == "ok"
    report = mac("26.1")
    report["origin"]["packages"]["mlx-metal"]["tag"] = "py3-none-macosx_26_2_arm64"
    level, line = found(report, "mlx origin")
    assert level == "fail"
    assert "built for macOS 26.2, this is 26.1" in line


def test_parts_of_unlike_releases_are_a_fault() -> None:
    """On Linux too, where the back-end is a package of its own."""
    packages = mac()["origin"]["packages"]
    assert list(releases_differ(packages)) == []
    packages["mlx-lm"] = {"version": "0.33.0"}
    assert list(releases_differ(packages)) == []
    packages["mlx-metal"]["version"] = "0.31.2"
    (finding,) = releases_differ(packages)
    assert finding.level == "fail"
    assert "mlx 0.32.4, mlx-metal 0.31.2" in finding.text


@pytest.mark.parametrize(
    ("memory", "limit", "level", "advised_mb"),
    [
        (8, 5, "ok", None),
        (16, 10, "ok", None),
        (16, 14, "warn", 10 * 1024),
        (64, 48, "ok", None),
        (64, 40, "ok", int(51.2 * 1024)),
        (64, 60, "warn", int(51.2 * 1024)),
        (8, 7, "warn", 2 * 1024),
    ],
)
def test_advice_on_wired_memory_leaves_enough_to_the_system(
    memory: int, limit: int, level: str, advised_mb: int | None
) -> None:
    """A fifth, and at least 6 GB: 8 GB of memory is never told to give the GPU 6.4."""
    told, line = found(mac(memory=memory, limit=limit), "wired")
    assert told == level
    assert ("iogpu.wired_limit_mb" in line) == (advised_mb is not None)
    if advised_mb is not None:
        assert f"iogpu.wired_limit_mb={advised_mb}" in line


def test_other_machines_have_no_such_findings() -> None:
    """Neither Linux nor CUDA."""
    assert list(look_at_mac({"metal": False})) == []


def test_the_tests_that_the_page_on_macs_names_are_there() -> None:
    """A table of what is tested is worth something as long as it is true."""
    page = (ROOT / "docs" / "macs.md").read_text()
    named = re.findall(r"`((?:tests/[\w/]+\.py)?(?:::\w+)?)`", page.split("## Reported by others")[1])
    file = ""
    for path, _, test in (name.partition("::") for name in named):
        file = path or file
        text = (ROOT / file).read_text()
        assert not test or f"def {test}(" in text, f"{file}::{test}"
    assert len(named) > 20
