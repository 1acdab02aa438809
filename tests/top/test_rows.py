"""What the tables say of workers whose every number is known."""

from __future__ import annotations

import msgspec
import pytest

from zmqengine.protocol.launcher import ModelEntry
from zmqengine.protocol.messages import Description, ModelCard, Progress, RequestInfo, SessionInfo, Status
from zmqengine_metrics.snapshot import Snapshot
from zmqengine_top import rows
from zmqengine_top.history import WorkerHistory

DESCRIPTION = Description(
    call=0, protocol=(1, 1), version="1", name="w", pid=1, epoch=bytes(8), state="ready", progress=Progress("ready"),
    cmd="", out="", model=ModelCard("m", 1000, 4096, [0], "hash", 0),
)  # fmt: skip
STATUS = Status(
    call=0, epoch=bytes(8), state="ready", uptime_s=100.0, pass_age_ms=1.0, facts={},
    numbers={"running": 1, "queued": 1, "generated_tokens": 500, "passes": 10, "prompt_tokens": 30, "cached_tokens": 10,
             "restarts": 2, "pass_ms_p50": 5.25},
    memory={"weights": 3 << 20, "kv": 1 << 20, "limit": 16 << 20},
    sessions=[SessionInfo("s1", "chat", running=1), SessionInfo("s2", "slow", lagging=True, unsent_tokens=1234)],
    requests=[
        RequestInfo("r1", "s1", "decode", age_s=9, prompt_tokens=40, cached_tokens=8, output_tokens=20, max_tokens=99),
        RequestInfo("r2", "s2", "queued", "memory: and why", age_s=3, prompt_tokens=7, max_tokens=10),
    ],
)  # fmt: skip


@pytest.fixture
def history() -> WorkerHistory:
    """A worker seen twice, two seconds apart."""
    seen = WorkerHistory("w")
    earlier = msgspec.structs.replace(
        STATUS,
        uptime_s=98.0,
        numbers=STATUS.numbers | {"generated_tokens": 440},
        requests=[msgspec.structs.replace(STATUS.requests[0], output_tokens=10)],
    )
    seen.take(Snapshot("w", DESCRIPTION, earlier), 1.0)
    assert seen.rate("generated_tokens") is None
    seen.take(Snapshot("w", DESCRIPTION, STATUS), 3.0)
    return seen


def test_a_worker_is_one_line(history: WorkerHistory) -> None:
    """State and how long, load, rate, memory as a share of its limit, a pass."""
    assert rows.worker_row(history, 3.0).cells == (
        "w", "ready 1m40", "m", "1", "1", "30", "25% of 16M", "5.2 ms",
    )  # fmt: skip


def test_requests_say_their_phase_and_what_they_wait_for(history: WorkerHistory) -> None:
    """In the order asked for."""
    lines = rows.request_lines([history])
    cells = {line.info.request: rows.request_row(line).cells for line in lines}
    assert cells["r1"] == ("r1", "chat", "decode", "40 (8 c)", "20/99", "5", "9s")
    assert cells["r2"] == ("r2", "slow", "waits: memory", "7", "0/10", "0", "3s")
    orders = dict(rows.ORDERS)
    assert [line.info.request for line in sorted(lines, key=orders["front-end"])] == ["r1", "r2"]
    assert [line.info.request for line in sorted(lines, key=orders["age"])] == ["r1", "r2"]
    assert [line.info.request for line in sorted(lines, key=orders["prompt"])] == ["r1", "r2"]


def test_a_front_end_that_is_behind_stands_out(history: WorkerHistory) -> None:
    """By how much."""
    assert rows.session_rows([history])[1].cells == ("slow", "w", "0", "0", "0", "1,234 tokens")


def test_details_name_memory_cache_passes_and_waits(history: WorkerHistory) -> None:
    """Four lines."""
    assert rows.details(history) == [
        "memory   weights 3.0M, kv 1.0M",
        "cache    0 prompts, 0 of 0, 25% of prompt tokens from it",
        "passes   0/s, restarted 2x",
        "waits    1 for memory",
    ]


def test_a_model_that_is_not_loaded_is_not_one_that_is_silent(history: WorkerHistory) -> None:
    history.take(Snapshot("w"), 5.0)
    history.entry = ModelEntry(
        name="w", state="loading", address="", fraction=0.4, need_bytes=3 << 30, waiting=2
    )
    assert rows.worker_row(history, 9.0).cells == ("w", "loading 40%", "w", "", "2", "", "needs 3.0G", "")
    history.entry = ModelEntry(name="w", state="failed", address="", message="no such file")
    assert rows.details(history)[0] == "no such file"


def test_a_silent_worker_keeps_its_line(history: WorkerHistory) -> None:
    """With the model it had, and since when; rates begin anew with its next life."""
    history.take(Snapshot("w"), 5.0)
    history.take(Snapshot("w"), 6.0)
    assert rows.worker_row(history, 9.0).cells[:3] == ("w", "silent 4s", "m")
    assert rows.request_lines([history]) == []
    reborn = msgspec.structs.replace(STATUS, epoch=b"\1" * 8, numbers={"generated_tokens": 3}, requests=[])
    history.take(Snapshot("w", DESCRIPTION, reborn), 10.0)
    assert history.rate("generated_tokens") is None


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [(0, "0"), (999, "999"), (1024, "1.0K"), (15 << 20, "15M"), (3 << 40, "3.0T"), (1000, "1.0K")],
)
def test_sizes_are_short(bytes_: int, text: str) -> None:
    """Four places at the most."""
    assert rows.size(bytes_) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (61, "1m01"), (7260, "2h01"), (90_000, "1d01")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    """Five places at the most."""
    assert rows.span(seconds) == text
