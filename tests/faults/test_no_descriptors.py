"""A process without a free file descriptor: what runs goes on, and what needs a file is tried again."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from tests.worker.harness import Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.prefix_cache.disk.directory import Directory, Refused
from zmqengine.worker.process.memory_pressure import pressure_source
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine.worker.process.power import power_assertion


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[Callable[[], None]]:
    """All that the limit allows are open; a call opens those that were closed meanwhile, by a collection for one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))

    def fill() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)

    try:
        fill()
        yield fill
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_streams_go_on_and_everything_else_is_tried_again(make_harness, tmp_path: Path) -> None:
    """Claims, pressure, socket files that were removed, the power assertion, cached prompts."""
    share = MemoryShare(tmp_path / "claims", "mine", None)
    share.claim(1 << 20, 1 << 40)
    config = FakeEngineConfig()
    harness: Harness = make_harness(config, memory_share=share, power=power_assertion(wanted=True))
    directory, run = Directory(tmp_path / "cache", SALT, ROOMY), chain(0, 2)
    front_end = harness.front_end()
    sent = front_end.insert_message("a", [1, 2, 3], max_tokens=300)
    front_end.call(sent)
    harness.passes(3)
    ctl = harness.sockets.files[1]
    with no_descriptor_left() as fill:
        ctl.unlink()
        for _ in range(20):
            harness.clock.advance(1.1)
            harness.pass_()
        assert pressure_source()() == "normal"
        fill()
        with pytest.raises(Refused, match="Too many open files"):
            directory.write(run)
    front_end.wait_for_end("a")
    assert front_end.tokens["a"] == expected_tokens(row_of(sent), config)
    harness.clock.advance(1.1)
    harness.pass_()
    assert ctl.exists()
    assert share.look() is not None
    directory.write(run)
    assert plain(directory.read([block.key for block in run])) == plain(run)
    share.close()


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[object]:
    """One harness."""
    made: list[Harness] = []

    def make(*arguments: object, **options: object) -> Harness:
        made.append(Harness(tmp_path / "w", *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for harness in made:
        harness.close()
