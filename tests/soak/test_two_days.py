"""48 hours of a worker's life by a fake clock: front-ends come, talk, fall silent for hours, come back and leave."""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import pytest

from tests.worker.harness import FrontEnd, Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.protocol.messages import Ack, Bye, Insert, Ping, Rejected
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine.worker.process.power import PowerAssertion

CONFIG = FakeEngineConfig(context_tokens=100_000, prompt_cache_bytes=1 << 20)
HOURS = int(os.environ.get("ZMQENGINE_SIMULATED_HOURS", "48"))
PERIODS = 6
PASS_S = 10.0
"""An idle worker makes a pass at least that often."""
GROWN_MAX = 0.01
"""Of the blocks of memory that Python holds, from the second period to the last."""


class Power:
    """The system's side of a power assertion."""

    held = 0

    def take(self) -> None:
        self.held += 1

    def drop(self) -> None:
        self.held -= 1


class Visitor:
    """A front-end with one secret; stopped for an hour now and then, in the middle of a stream."""

    def __init__(self, harness: Harness, number: int) -> None:
        self._harness = harness
        self._number, self._requests = number, 0
        self._front_end: FrontEnd = harness.front_end()
        self.stopped_until_s = 0.0
        self._unfinished: Insert | None = None

    @property
    def is_stopped(self) -> bool:
        return self._unfinished is not None

    def ping(self) -> None:
        self._front_end.call(Ping(self._front_end.next_call()))

    def talk(self, chance: random.Random) -> None:
        """One request, with the tokens it has to have."""
        message = self._insert(chance, chance.choice([1, 20, 100]))
        self._front_end.wait_for_end(message.request)
        self._check(message)

    def stop(self, chance: random.Random) -> None:
        """Fall silent with a stream that goes on for longer than the lease."""
        message = self._insert(chance, 3000)
        self._front_end.call(message)
        self._harness.passes(50)
        self.stopped_until_s = self._harness.clock() + chance.uniform(600, 4 * 3600)
        self._unfinished = message

    def go_on(self) -> None:
        """Find the lease ended, say hello again, and have the stream go on where it was read to."""
        front_end, message = self._front_end, self._unfinished
        assert message is not None
        front_end.read()
        assert [end.finish for end in front_end.ends[message.request]] == ["lease"]
        reply = front_end.call(Ping(front_end.next_call()))
        assert isinstance(reply, Rejected)
        assert reply.code == "unknown_session"
        emitted = front_end.tokens[message.request]
        self._front_end = again = self._harness.front_end(secret=front_end.secret)
        self._forget(front_end)
        sent = again.insert_message(
            f"{message.request}-again", message.prompt, max_tokens=message.max_tokens, emitted=list(emitted)
        )
        # The output goes on at the index where it was cut.
        again.tokens[sent.request] = list(emitted)
        again.call(sent)
        again.wait_for_end(sent.request)
        assert again.tokens[sent.request] == expected_tokens(row_of(message), CONFIG)
        self._unfinished = None

    def leave(self, *, politely: bool) -> None:
        if politely:
            self._front_end.call(Bye(self._front_end.next_call()))
        self._forget(self._front_end)

    def _insert(self, chance: random.Random, tokens: int) -> Insert:
        self._requests += 1
        prompt = [chance.randrange(1, 500) for _ in range(chance.choice([3, 30, 200]))]
        message = self._front_end.insert_message(
            f"{self._number}-{self._requests}", prompt, max_tokens=tokens
        )
        if tokens <= 100:
            self._front_end.call(message)
        return message

    def _check(self, message: Insert) -> None:
        front_end = self._front_end
        assert front_end.tokens[message.request] == expected_tokens(row_of(message), CONFIG)
        front_end.call(Ack(front_end.next_call(), [message.request]))

    def _forget(self, front_end: FrontEnd) -> None:
        front_end.close()
        self._harness.front_ends.remove(front_end)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_days_leave_nothing_behind(tmp_path: Path) -> None:
    """Every stream has its tokens, silent front-ends come back, and memory is flat."""
    power = Power()
    share = MemoryShare(tmp_path / "claims", "mine", None)
    share.claim(1 << 20, 1 << 40)
    harness = Harness(tmp_path / "w", CONFIG, memory_share=share, power=PowerAssertion(power))
    harness.engine.lowers_clock = True
    chance, counts, blocks = random.Random(32), dict.fromkeys(("talks", "stops", "visits"), 0), list[int]()
    for _ in range(PERIODS):
        until_s = harness.clock() + HOURS / PERIODS * 3600
        visitors: list[Visitor] = []
        while harness.clock() < until_s:
            _minute(harness, visitors, chance, counts)
        while visitors:
            visitors.pop().leave(politely=False)
        for _ in range(30):
            harness.clock.advance(PASS_S)
            harness.pass_()
        assert (len(harness.actor.sessions), len(harness.actor.lifecycle.live())) == (0, 0)
        assert (harness.actor.outgoing.all_held_bytes, power.held) == (0, 0)
        # Bounded by their own rules, and of changing size.
        harness.engine.calls.clear()
        harness.engine.limit_prompt_cache(0)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    print(f"{HOURS} hours, {counts}, blocks {blocks}")
    assert counts["stops"] >= HOURS / 2
    assert counts["talks"] >= 10 * HOURS
    assert blocks[-1] <= blocks[1] * (1 + GROWN_MAX)
    harness.close()
    share.close()


def _minute(harness: Harness, visitors: list[Visitor], chance: random.Random, counts: dict[str, int]) -> None:
    for visitor in [visitor for visitor in visitors if visitor.stopped_until_s < harness.clock()]:
        if visitor.is_stopped:
            visitor.go_on()
    awake = [visitor for visitor in visitors if not visitor.is_stopped]
    event = chance.random()
    if event < 0.1 and len(visitors) < 6:
        counts["visits"] += 1
        visitors.append(Visitor(harness, counts["visits"]))
    elif event < 0.5 and awake:
        counts["talks"] += 1
        chance.choice(awake).talk(chance)
    elif event < 0.55 and awake:
        counts["stops"] += 1
        chance.choice(awake).stop(chance)
    elif event < 0.6 and awake:
        leaves = chance.choice(awake)
        visitors.remove(leaves)
        leaves.leave(politely=chance.random() < 0.5)
    for turn in range(6):
        harness.clock.advance(PASS_S)
        harness.pass_()
        if turn % 3 == 2:
            for visitor in visitors:
                if not visitor.is_stopped:
                    visitor.ping()
