"""Workers on one machine share its memory: each live process has a claim, and none outlives it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.workers import WorkerProcess, wait_until
from zmqengine.protocol.messages import Status
from zmqengine.worker.process.memory_share import Claim, MemoryShare, View, share_of

GIB = 1 << 30
CHILD = """
import sys
from pathlib import Path
from zmqengine.worker.process.memory_share import MemoryShare
limit = int(sys.argv[3]) or None
share = MemoryShare(Path(sys.argv[1]), sys.argv[2], limit)
print(share.claim(int(sys.argv[4]), int(sys.argv[5])).limit_bytes, flush=True)
for line in sys.stdin:
    print(share.look().limit_bytes, flush=True)
share.close()
"""


class Child:
    """A worker's process, as far as its claim goes."""

    def __init__(
        self, directory: Path, name: str, *, limit: int = 0, weights: int = 0, total: int = 12 * GIB
    ) -> None:
        arguments = [str(directory), name, str(limit), str(weights), str(total)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.limit = self._read()

    def ask(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.process.kill()
        child.process.wait(60)
        for pipe in (child.process.stdin, child.process.stdout):
            assert pipe is not None
            pipe.close()


def test_the_first_worker_has_all_and_the_second_what_it_leaves(tmp_path, children):
    """Together they hold no more than there is, weights included, once the first has looked again."""
    children.append(Child(tmp_path, "first", weights=4 * GIB))
    assert children[0].limit == 12 * GIB
    children.append(Child(tmp_path, "second", weights=2 * GIB))
    assert children[1].limit == 5 * GIB
    assert children[0].ask() == 7 * GIB


def test_a_limit_that_was_given_is_kept_and_the_others_share_the_rest(tmp_path, children):
    """It does not depend on anybody else, not even where it is too much."""
    children.append(Child(tmp_path, "given", limit=8 * GIB, weights=GIB))
    children.append(Child(tmp_path, "second"))
    assert children[1].limit == 4 * GIB
    children.append(Child(tmp_path, "third"))
    assert [child.ask() for child in children] == [8 * GIB, 2 * GIB, 2 * GIB]
    children.append(Child(tmp_path, "greedy", limit=8 * GIB))
    assert [child.ask() for child in children] == [8 * GIB, 0, 0, 8 * GIB]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_claim_of_a_dead_worker_is_none(tmp_path, children, number):
    """However it died; its file goes with the next look."""
    children.append(Child(tmp_path, "first"))
    children.append(Child(tmp_path, "second"))
    assert children[0].ask() == 6 * GIB
    children[1].end(number)
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert children[0].ask() == 12 * GIB
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_claim_is_withdrawn_and_others_are_named(tmp_path, children):
    """Who else is there is for people; closing twice is no error."""
    children.append(Child(tmp_path, "first", weights=5))
    mine = MemoryShare(tmp_path, "mine", None)
    view = mine.claim(0, 12 * GIB)
    assert view.description == f"6.00 GiB of 12.00 GiB; first (pid {children[0].process.pid}) has 6.00 GiB"
    assert not view.is_too_much
    assert mine.look() == view
    mine.close()
    mine.close()
    assert children[0].ask() == 12 * GIB


def test_twelve_workers_that_start_at_once_all_count(tmp_path, children):
    """No claim is taken for that of a dead process in the moment that it is made."""
    children.extend(Child(tmp_path, f"w{number}") for number in range(12))
    assert [child.ask() for child in children] == [GIB] * 12


def test_a_stopped_process_that_holds_the_lock_stops_nobody(tmp_path, monkeypatch):
    """A start waits for the lock for a bounded time; a later look does not wait at all."""
    monkeypatch.setattr("zmqengine.worker.process.memory_share.LOCK_WAIT_S", 0.05)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        mine = MemoryShare(tmp_path, "mine", None)
        assert mine.claim(10, 100).limit_bytes == 100
        assert mine.look() is None
    assert mine.look() == View(100, "0.00 GiB of 0.00 GiB", False, 0)
    mine.close()


def test_limits_that_are_too_high_together_are_told(tmp_path):
    """A limit that was given is kept; that it does not fit is said."""
    first = MemoryShare(tmp_path, "first", 80)
    assert not first.claim(10, 100).is_too_much
    second = MemoryShare(tmp_path, "second", 30)
    assert second.claim(10, 100).is_too_much
    assert second.claim(10, 110) == (
        30,
        "0.00 GiB of 0.00 GiB; " + f"first (pid {os.getpid()}) has 0.00 GiB",
        False,
        0,
    )
    first.close()
    second.close()


def test_a_directory_that_is_gone_or_cannot_be_is_no_disaster(tmp_path):
    """A look finds nothing; a start says what is wrong."""
    mine = MemoryShare(tmp_path / "claims", "mine", None)
    mine.claim(1, 100)
    shutil.rmtree(tmp_path / "claims")
    (tmp_path / "claims").touch()
    assert mine.look() is None
    mine.close()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        MemoryShare(tmp_path / "file", "mine", None)


@pytest.mark.parametrize("what", ["the claim", "the lock", "the directory"])
def test_a_claim_that_was_removed_is_written_anew_and_counts_once(tmp_path, children, what):
    """Whoever cleans /tmp: the other worker never takes this one's memory for longer than until the next look."""
    mine = MemoryShare(tmp_path / "claims", "mine", None)
    mine.claim(GIB, 12 * GIB)
    children.append(Child(tmp_path / "claims", "other", weights=GIB))
    assert children[0].ask() == 6 * GIB
    if what == "the directory":
        shutil.rmtree(tmp_path / "claims")
    elif what == "the lock":
        (tmp_path / "claims" / "lock").unlink()
    else:
        for path in (tmp_path / "claims").glob(f"{os.getpid()}-*"):
            path.unlink()
    for _ in range(2):
        assert mine.look() is not None
        assert children[0].ask() == 6 * GIB
    assert mine.look() is not None
    assert mine.look().limit_bytes == 6 * GIB
    assert len(list((tmp_path / "claims").glob("*.json"))) == 2
    mine.close()
    assert children[0].ask() == 12 * GIB


def test_rows_that_decode_are_told_to_others(tmp_path):
    """While they do: an engine that reads long prompts beside them keeps its chunks short. Memory is not concerned."""
    streams, reads = (MemoryShare(tmp_path, name, None) for name in ("streams", "reads"))
    for share in (streams, reads):
        share.claim(0, 12 * GIB)
    assert streams.look(8).rows_decoding == 0
    assert reads.look(0).rows_decoding == 8
    assert reads.look(0).limit_bytes == 6 * GIB
    assert streams.look(0).rows_decoding == 0
    assert reads.look(0).rows_decoding == 0
    streams.close()
    reads.close()


def test_a_touched_claim_is_not_old(tmp_path):
    """What cleans /tmp goes by these times."""
    mine = MemoryShare(tmp_path, "mine", None)
    paths = [tmp_path, *tmp_path.glob("*.json")]
    for path in paths:
        os.utime(path, (0, 0))
    mine.touch()
    assert len(paths) == 2
    assert all(path.stat().st_mtime > 1e9 and path.stat().st_atime > 1e9 for path in paths)
    mine.close()


@pytest.mark.process
def test_a_worker_starts_where_no_claim_can_be_made(tmp_path, monkeypatch):
    """It says so, and takes what the system recommends."""
    (tmp_path / ".memory").touch()
    monkeypatch.setenv("ZMQENGINE_DIR", str(tmp_path))
    with WorkerProcess(None, supervise=False) as worker:
        assert status_of(worker).memory["limit"] > 1 << 28
        assert "other workers on this machine are not taken into account" in worker.log


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    limits=st.lists(st.integers(1, 1000), max_size=3),
    total=st.integers(10_000, 20_000),
)
def test_shares_add_up_to_at_most_the_total(weights, limits, total):
    """Whoever looks, all of them see parts of one whole that each hold their weights."""
    claims = [Claim("a", number, bytes_, None) for number, bytes_ in enumerate(weights)]
    claims += [Claim("b", 100 + number, 1, limit) for number, limit in enumerate(limits)]
    shares = [share_of(claim, [other for other in claims if other is not claim], total) for claim in claims]
    assert total - len(claims) <= sum(shares) <= total
    assert all(
        share >= claim.weights_bytes for share, claim in zip(shares, claims, strict=True) if claim.name == "a"
    )


@pytest.mark.process
def test_two_real_workers_say_what_they_hold(tmp_path, monkeypatch):
    """On the bundled model, without and with a limit of their own: the second is given what the first leaves."""
    monkeypatch.setenv("ZMQENGINE_DIR", str(tmp_path))
    with WorkerProcess(None, supervise=False) as first:
        alone = status_of(first)
        # As a launcher starts it, which has found room for this much.
        least = 2 * alone.memory["limit"] // 3
        with WorkerProcess(None, supervise=False, memory_least_bytes=least) as second:
            beside = status_of(second)
            with first.client() as client:

                def both_fit() -> bool:
                    # A request makes it look; at first the second has only claimed, and has no weights yet.
                    client.generate_tokens([1, 2, 3], max_tokens=2).read()
                    return client.status().memory["limit"] + beside.memory["limit"] <= alone.memory["limit"]

                wait_until(both_fit, "the first does not leave the second its share")
                shared = client.status()
        with WorkerProcess(None, supervise=False, memory_limit_bytes=1 << 28) as third:
            given = status_of(third)
    assert f"(pid {second.process.pid}) has" in shared.facts["memory"]
    assert least <= beside.memory["limit"] <= alone.memory["limit"] - alone.memory["weights"]
    assert f"(pid {first.process.pid}) has" in beside.facts["memory"]
    assert given.memory["limit"] == 1 << 28
    assert "0.25 GiB of" in given.facts["memory"]


def status_of(worker: WorkerProcess) -> Status:
    worker.wait_ready()
    with worker.client() as client:
        return client.status()
