"""docs/request.md walks one request through the files, docs/worker.md names its decisions: the code agrees."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from zmqengine.testing import FakeWorker
from zmqengine_client import Client

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = [
    (place, re.findall(r"^\|[^|]*\| `([^`]+)` \| (?:`([^`]+)`)? ?\|$", rows, re.MULTILINE))
    for place, rows in re.findall(
        r"^\| \*\*([^*]+)\*\*.*\n((?:\|(?! \*\*).*\n)+)", (ROOT / "docs/request.md").read_text(), re.MULTILINE
    )
]
"""The steps of each part of the way, which goes on one thread."""
STEPS = [step for _, steps in SECTIONS for step in steps]


@pytest.mark.parametrize(
    ("name", "owner", "method"),
    re.findall(r"`([a-z_/]+\.py)`: `(\w+)\.(\w+)`", (ROOT / "docs/worker.md").read_text()),
)
def test_the_decisions_of_the_scheduler_stand_where_the_page_says(name: str, owner: str, method: str) -> None:
    """docs/worker.md names the file and the method of each."""
    text = (ROOT / "zmqengine/worker" / name).read_text()
    assert f"class {owner}:" in text
    assert f"    def {method}(" in text


def test_the_files_of_the_walk_exist() -> None:
    """Every file that the page names is in the repository."""
    assert len(STEPS) > 30
    for name, _ in STEPS:
        assert (ROOT / name).is_file(), name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="functions do not know their whole name")
def test_a_real_request_goes_the_way_that_is_written() -> None:
    """Every call of the page happens, those of each part in its order. The engine is the fake one."""
    calls: dict[int, list[tuple[str, str]]] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            made = (frame.f_code.co_filename, frame.f_code.co_qualname)  # type: ignore[attr-defined]
            calls.setdefault(threading.get_ident(), []).append(made)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with FakeWorker() as worker, Client(worker.address) as client:
            assert len(client.generate_tokens([1, 2, 3], max_tokens=3).read().tokens) == 3
    finally:
        sys.setprofile(before)
        threading.setprofile(before)  # type: ignore[arg-type]
    for place, steps in SECTIONS:
        way = [
            # In an installed wheel the packages of `clients` stand beside the others.
            (
                name.removeprefix("clients/").replace("step/mlx_engine", "fake/fake_engine"),
                call.replace("MlxEngine", "FakeEngine"),
            )
            for name, call in steps
        ]
        assert any(_goes(thread, way) for thread in calls.values()), f"{place}: {way}"


def _goes(calls: list[tuple[str, str]], way: list[tuple[str, str]]) -> bool:
    """Whether all of the way is among these calls, in this order."""
    left = iter(calls)
    return all(any(made == call and file.endswith(name) for file, made in left) for name, call in way if call)
