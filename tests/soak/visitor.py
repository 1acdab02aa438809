"""A front-end with moods: it reads, dawdles, aborts, leaves and comes back, and checks every token it is given."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine_client import Client, TokenStream
from zmqengine_client.errors import DeadlineExceeded, Overloaded, RowFailed, ZmqEngineError

POISON = 666


class Visitor:
    """One thread with one client at a time. `outcomes` counts how requests ended, `faults` holds what must not be."""

    def __init__(self, make_client: Callable[[], Client], fake: FakeEngineConfig, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.resumed = 0
        self._make_client = make_client
        self._fake = fake
        self._random = Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"visitor {seed}")
        self._thread.start()

    def stop(self) -> None:
        """Start nothing new."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait until what it started has ended."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.faults.append("a request never got its terminal answer")

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._make_client() as client:
                    for _ in range(self._random.randint(1, 30)):
                        if self._stopping.is_set():
                            break
                        self._visit(client)
                    self.resumed += client.counters.resumed_streams
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            raise

    def _visit(self, client: Client) -> None:
        """A few requests at once, each treated in its own way."""
        random = self._random
        pairs = []
        for _ in range(random.choice([1, 1, 2, 6])):
            prompt = [random.randrange(1, 600) for _ in range(random.choice([1, 8, 8, 700]))]
            if random.random() < 0.05:
                prompt[0] = POISON
            request = RowRequest(
                0, prompt, random.choice([1, 10, 80, 300]), seed=random.getrandbits(60),
                stop_token_ids=frozenset({0, random.randrange(1000)}),
            )  # fmt: skip
            stream = client.generate_tokens(
                prompt, max_tokens=request.max_tokens, seed=request.seed, stop_token_ids=request.stop_token_ids,
                priority=random.randint(-2, 2), logprobs=random.choice([None, None, 2]),
                deadline_ms=random.choice([None] * 8 + [20, 500]),
            )  # fmt: skip
            pairs.append((request, stream))
        for request, stream in pairs:
            self._follow(request, stream, random.choice(["read", "read", "read", "dawdle", "abort", "leave"]))

    def _follow(self, request: RowRequest, stream: TokenStream, mood: str) -> None:
        seen: list[int] = []
        patience = self._random.randint(1, 20)
        try:
            for chunk in stream:
                if chunk.first_index != len(seen):
                    self.faults.append(f"expected index {len(seen)}, got {chunk.first_index}")
                seen += chunk.tokens
                if mood == "dawdle":
                    time.sleep(0.01)
                if len(seen) >= patience and mood == "abort":
                    stream.abort()
                if len(seen) >= patience and mood == "leave":
                    self._count("left", request, seen)
                    break
            else:
                self._count(stream.result.finish, request, seen)
        except RowFailed:
            self._count("poisoned" if POISON in request.prompt else "error", request, seen)
        except (DeadlineExceeded, Overloaded) as error:
            self._count(error.code, request, seen)
        except ZmqEngineError as error:
            self.faults.append(f"{error.code}: {error}")

    def _count(self, outcome: str, request: RowRequest, seen: list[int]) -> None:
        expected = expected_tokens(request, self._fake)
        if seen != expected[: len(seen)]:
            self.faults.append(f"{outcome}: {len(seen)} tokens that are not the expected ones")
        if outcome in ("stop", "length") and len(seen) != len(expected):
            self.faults.append(f"{outcome} after {len(seen)} of {len(expected)} tokens")
        if outcome == "error":
            self.faults.append("a healthy row ended with error")
        self.outcomes[outcome] += 1
