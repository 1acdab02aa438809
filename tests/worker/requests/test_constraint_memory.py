"""Memory of constraints: measured, counted, and bounded."""

from __future__ import annotations

import gc
import re

import pytest

from tests.support.workers import WorkerProcess, wait_until
from zmqengine.errors import ConstraintFailed, NeverFits, Overloaded, ZmqEngineError
from zmqengine.protocol.messages import Constraint
from zmqengine.worker.requests.constraint_memory import ConstraintMemory
from zmqengine_client import TextStream

LIMIT_BYTES = 96 << 20
PARTS = ("weights_bytes", "kv_bytes", "parked_bytes", "prompt_cache_bytes", "constraint_bytes")
HELD = Constraint("regex", r"(\p{L}{1,40}\s){0,2000}")
"""0.5 MiB when compiled, and 20 to 60 KiB more with each token: of six that run to 300 tokens few are whole."""
LONG = Constraint("regex", "." * 30_000)
"""4 MiB when compiled."""


def test_a_claim_counts_for_as_long_as_it_lives() -> None:
    """A claim past the bound is refused with the numbers; growth of the heap counts where it exceeds the claims."""
    memory = ConstraintMemory()
    memory.bytes_max = 100
    memory.observe(5_000)
    first, second = memory.claim(60), memory.claim(30)
    assert memory.bytes == 90
    with pytest.raises(Overloaded, match=r"takes 20 bytes when compiled.* take 90 of the 100"):
        memory.claim(20)
    with pytest.raises(NeverFits, match=r"takes 101 bytes .* has 100"):
        memory.claim(101)
    del first
    gc.collect()
    assert memory.bytes == 30
    memory.observe(5_090)
    assert memory.bytes == 90
    with pytest.raises(Overloaded):
        memory.claim(20)
    # Growth that the constraints cannot have caused, as of blocks on their way to a disk, takes no room from them.
    memory.limit_growth(40)
    memory.observe(5_090)
    assert memory.bytes == 40
    third = memory.claim(20)
    memory.observe(5_095)
    assert memory.bytes == 50
    del second, third
    gc.collect()
    memory.observe(9_000)
    assert memory.bytes == 0


def error_of(stream: TextStream) -> ZmqEngineError | None:
    """The error that ends a stream, which is read."""
    try:
        stream.read()
    except ZmqEngineError as error:
        return error
    return None


def is_one_too_many(error: ZmqEngineError | None) -> bool:
    """Whether a constraint was refused because of those that are there."""
    return isinstance(error, Overloaded) and "those of other requests take" in str(error)


def test_hostile_constraints_stay_within_their_share_of_the_memory() -> None:
    """One that is too large is refused, as is one too many; those that grow end alone, the largest first.

    A request without a constraint, and a simple one, are not concerned; what ended takes nothing.
    """
    with (
        WorkerProcess(None, model="pico", memory_limit_bytes=LIMIT_BYTES) as worker,
        worker.client() as client,
    ):
        client.wait_ready()

        def numbers() -> dict[str, float]:
            return client.status().numbers

        bytes_max = numbers()["constraint_bytes_max"]
        assert bytes_max == LIMIT_BYTES / 16
        beside = client.generate("Once", max_tokens=150, ignore_eos=True)
        with pytest.raises(NeverFits, match=f"the worker has {bytes_max:.0f} for constraints"):
            client.generate("Once", constraint=Constraint("regex", "." * 60_000)).read()
        # Each alone fits, and runs for longer than the next one is compiled.
        several = [client.generate("Once", constraint=LONG, max_tokens=300) for _ in range(4)]
        errors = [error_of(stream) for stream in several]
        assert any(map(is_one_too_many, errors))
        assert None in errors
        wait_until(lambda: numbers()["constraint_bytes"] == 0, "memory stays")

        # First, as it would be one too many itself once the others have passed the bound.
        simple = client.generate("Once", constraint=Constraint("regex", "[a-z ]{40}"), max_tokens=100)
        growing = [
            client.generate(
                f"Once {n}", constraint=HELD, max_tokens=300, ignore_eos=True, temperature=1.0, seed=n
            )
            for n in range(6)
        ]
        errors = []
        for stream in growing:
            errors.append(error_of(stream))
            now = numbers()
            assert sum(now[part] for part in PARTS) <= LIMIT_BYTES
        ended = [str(error) for error in errors if isinstance(error, ConstraintFailed)]
        # However fast the machine is: a row alone passes the bound before 300 tokens. The last ones may come when the
        # first have passed it.
        refused = sum(map(is_one_too_many, errors))
        assert len(ended) >= 2
        assert len(ended) + refused + errors.count(None) == len(errors), errors
        # It is looked at ten times a second: by how much they pass it depends on the machine.
        assert all(bytes_max < int(re.findall("requests take ([0-9]+) bytes", each)[0]) for each in ended)
        assert simple.read().finish == "stop"
        assert beside.read().finish == "length"
        wait_until(lambda: numbers()["constraint_bytes"] == 0, "memory stays")
