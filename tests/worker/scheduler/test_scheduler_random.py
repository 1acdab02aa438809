"""Thousands of random operations on a worker, against a plain model of it: the tokens and end of each stream."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from tests.worker.harness import FrontEnd, Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeEngineError, expected_tokens
from zmqengine.engine.interface import StepResult
from zmqengine.protocol.messages import Ack, Insert

OPERATIONS = int(os.environ.get("ZMQENGINE_TEST_OPERATIONS", "2000"))
SEED = int(os.environ.get("ZMQENGINE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
POISON = 999
ENGINE = FakeEngineConfig(
    rows_max=6, prefill_chunk=24, context_tokens=400, kv_bytes_token=1000, prompt_cache_bytes=60_000
)


class _FailingEngine(FakeEngine):
    """Fails a step when told to, and every step in which a poisoned row decodes."""

    fail_next = False

    def next(self) -> StepResult:
        poisoned = any(POISON in row.request.prompt for row in self._rows.values())
        if self.fail_next or poisoned:
            self.fail_next = False
            raise FakeEngineError("a step failed")
        return super().next()


class _World:
    """Front-ends, their requests, and what is known of how these must end."""

    def __init__(self, directory: Path) -> None:
        self.random = random.Random(SEED)
        self.directory = directory
        self.lives = 0
        self.number = 0
        self.front_ends: list[FrontEnd] = []
        self.inserts: dict[str, tuple[FrontEnd, Insert]] = {}
        self.aborted: set[str] = set()
        self.checked = 0
        self.parked = self.failures = 0
        self.start()

    def start(self) -> None:
        """A new life of the worker; front-ends go on with what had not ended."""
        self.lives += 1
        directory = self.directory / str(self.lives)
        directory.mkdir(mode=0o700)
        self.engine = _FailingEngine(ENGINE)
        self.harness = Harness(
            directory,
            self.engine,
            memory_limit_bytes=700_000,
            growth_tokens=16,
            engine_failures_max=1000,
            queue_max=64,
            lease_ms=86_400_000,
        )
        old, self.front_ends = self.front_ends, [self.harness.front_end() for _ in range(3)]
        for before, now in zip(old, self.front_ends, strict=False):
            for name, (owner, insert) in list(self.inserts.items()):
                if owner is before:
                    now.tokens[name] = list(before.tokens.get(name, []))
                    emitted = {"emitted": now.tokens[name]} if now.tokens[name] else {}
                    self.insert(
                        now, name, list(insert.prompt), insert.max_tokens, insert.seed or 0, **emitted
                    )

    def restart(self) -> None:
        for front_end in self.front_ends:
            front_end.read()
        self.settle()
        self.close()
        self.start()

    def close(self) -> None:
        self.parked += self.harness.actor.counters.parked
        self.failures += self.harness.actor.counters.engine_failures
        self.harness.close()

    def insert(
        self,
        front_end: FrontEnd,
        name: str,
        prompt: list[int],
        max_tokens: int | None,
        seed: int,
        **fields: object,
    ) -> None:
        priority = self.random.choice([-5, 0, 0, 5])
        insert = front_end.insert_message(
            name, prompt, max_tokens=max_tokens, seed=seed, priority=priority, **fields
        )
        reply = front_end.call(insert)
        assert reply.KIND in (b"i", b"e"), reply
        if reply.KIND == b"i":
            self.inserts[name] = (front_end, insert)
        else:
            assert reply.code == "overloaded", reply  # type: ignore[attr-defined]
            self.inserts.pop(name, None)

    def operate(self) -> None:
        draw = self.random.random()
        if draw < 0.25:
            self.number += 1
            prompt = [self.random.randrange(1, 900) for _ in range(self.random.choice([1, 3, 30, 120]))]
            if self.random.random() < 0.01:
                prompt[0] = POISON
            max_tokens = self.random.choice([1, 5, 40, None])
            self.insert(
                self.random.choice(self.front_ends), f"r{self.number}", prompt, max_tokens, self.number
            )
        elif draw < 0.32 and self.inserts:
            name = self.random.choice(list(self.inserts))
            front_end, _ = self.inserts[name]
            self.aborted.add(name)
            front_end.abort(name)
        elif draw < 0.33:
            self.fail_once()
        elif draw < 0.332:
            self.restart()
        elif draw < 0.36:
            self.harness.clock.advance(self.random.random())
        else:
            self.harness.passes(self.random.randrange(1, 6))
        self.settle()

    def fail_once(self) -> None:
        """A failure that no row is the cause of: it costs nobody anything, unless it strikes while one is suspected."""
        if not self.harness.actor.scheduler.recovery.is_active:
            self.harness.clock.advance(61)
            self.engine.fail_next = True
            self.harness.passes(1)

    def settle(self) -> None:
        """Check and acknowledge what has ended."""
        for front_end in self.front_ends:
            front_end.read()
        for name, (front_end, insert) in list(self.inserts.items()):
            if name in front_end.ends:
                self.check(name, front_end, insert)
                del self.inserts[name]
                front_end.call(Ack(front_end.next_call(), [name]))

    def check(self, name: str, front_end: FrontEnd, insert: Insert) -> None:
        (end,) = front_end.ends[name]
        limit = ENGINE.context_tokens - len(insert.prompt) if insert.max_tokens is None else insert.max_tokens
        whole = expected_tokens(row_of(insert, max_tokens=limit), ENGINE)
        have = front_end.tokens.get(name, [])
        assert have == whole[: len(have)], name
        if POISON in insert.prompt:
            assert end.finish in ("error", "abort"), (name, end)
        elif end.finish == "abort":
            assert name in self.aborted
        else:
            assert end.finish == "length", (name, end)
            assert have == whole, name
        self.checked += 1


def test_random_operations_keep_every_stream_what_it_must_be() -> None:
    """Insert, abort, fail, poison, park and restart in any order: no stream lost, changed, or ended twice."""
    print(f"ZMQENGINE_TEST_SEED={SEED}")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        world = _World(Path(directory))
        try:
            for number in range(OPERATIONS):
                world.operate()
                if number == OPERATIONS // 2:
                    # Whatever is drawn, there is one.
                    world.restart()
            world.harness.run_until(lambda: world.settle() or not world.inserts, passes_max=20_000)
        finally:
            world.close()
    assert world.checked > OPERATIONS / 10
    assert world.lives > 1
    assert world.parked > 0
    assert world.failures > 0
