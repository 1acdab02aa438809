"""docs/request.md walks one request through the files: a real one goes the same way."""

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
STEPS = re.findall(
    r"^\|[^|]*\| `([^`]+)` \| (?:`([^`]+)`)? ?\|$", (ROOT / "docs/request.md").read_text(), re.MULTILINE
)
FILES_MAX = 34
"""What is crossed for one request of tokens, client to client: fewer is better."""


def test_the_files_of_the_walk_are_there_and_few() -> None:
    """Each is named once or more, and nobody has to read more than these."""
    assert len(STEPS) > 30
    for name, _ in STEPS:
        assert (ROOT / name).is_file(), name
    assert len({name for name, _ in STEPS}) <= FILES_MAX


@pytest.mark.skipif(sys.version_info < (3, 11), reason="functions do not know their whole name")
def test_a_real_request_goes_the_way_that_is_written() -> None:
    """Every call of the page happens, on each thread in the order of the page. The engine is the fake one."""
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
    left = list(calls.values())
    for written_name, written_call in STEPS:
        name = written_name.replace("engine/mlx_engine.py", "engine/fake_engine.py")
        call = written_call.replace("MlxEngine", "FakeEngine")
        if not call:
            continue
        places = [
            next(
                (place for place, (file, made) in enumerate(thread) if made == call and file.endswith(name)),
                None,
            )
            for thread in left
        ]
        assert any(place is not None for place in places), f"{call} in {name}"
        left = [
            thread if place is None else thread[place + 1 :]
            for thread, place in zip(left, places, strict=True)
        ]
