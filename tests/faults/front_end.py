"""A front-end process: keeps a number of streams running and checks every token of every one.

Run as `python -m tests.faults.front_end JSON`; `Job` is the JSON. It prints `READY` when its first tokens have come. It
starts no more streams when `streams_total` have been started or, without that, when its standard input ends; once
all have ended it prints a `Tally`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import IO, Any

import msgspec

from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine_client import Client, TokenStream
from zmqengine_client.errors import ZmqEngineError


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one front-end does. With `fake` the tokens are checked against that engine's.

    Jobs of the same `number` make the same requests in the same order.
    """

    address: str
    number: int = 0
    streams: int = 8
    streams_total: int | None = None
    tokens_min: int = 200
    tokens_max: int = 600
    temperature: float = 0.0
    prompt_tokens: int = 12
    fake: str | None = None
    ignore_eos: bool = False


class Tally(msgspec.Struct, kw_only=True):
    """What came of it. `missing` and `repeated` count tokens, `wrong` streams whose tokens are not the expected."""

    streams: int = 0
    tokens: int = 0
    missing: int = 0
    repeated: int = 0
    wrong: int = 0
    resumed: int = 0
    restarts_seen: int = 0
    restart_events: int = 0
    gaps: int = 0
    errors: list[str] = []
    outputs: dict[str, list[int]] = {}
    """Without `fake`: tokens by seed."""


class FrontEnd:
    """Runs a job in this process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tally = Tally()
        self.stop = threading.Event()
        self._random = random.Random(job.number)
        self._client = Client(
            job.address,
            name=f"front-end {job.number}",
            connect_timeout_s=60,
            answer_timeout_s=60,
            worker_lost_timeout_s=60,
            on_event=self._count_event,
        )
        self._running: dict[TokenStream, RowRequest] = {}
        self._indices: dict[TokenStream, int] = {}
        self._started = 0
        self._vocab_size = 0

    def run(self) -> Tally:
        """Until stopped and every stream has ended."""
        with self._client as client:
            model = client.wait_ready().model
            assert model is not None
            self._vocab_size = model.vocab_size
            self._fill()
            while self._running:
                for stream, chunk in client.select(list(self._running)):
                    if chunk is None:
                        self._finish(stream)
                        # A new round, so that the new stream is among those selected.
                        self._fill()
                        break
                    self._check_indices(stream, chunk.first_index, len(chunk.tokens))
            counters = client.counters
            self.tally.restarts_seen = counters.worker_restarts
            self.tally.gaps = counters.gaps
        return self.tally

    def _fill(self) -> None:
        job = self.job
        while len(self._running) < job.streams:
            if self.stop.is_set() if job.streams_total is None else self._started >= job.streams_total:
                return
            request = RowRequest(
                row=0,
                prompt=[self._random.randrange(1, self._vocab_size) for _ in range(job.prompt_tokens)],
                max_tokens=self._random.randint(job.tokens_min, job.tokens_max),
                seed=self._random.getrandbits(62),
                stop_token_ids=frozenset({0}),
            )
            stream = self._client.generate_tokens(
                request.prompt,
                max_tokens=request.max_tokens,
                seed=request.seed,
                temperature=job.temperature,
                ignore_eos=job.ignore_eos,
            )
            self._running[stream] = request
            self._indices[stream] = 0
            self._started += 1

    def _check_indices(self, stream: Any, first_index: int, count: int) -> None:
        expected = self._indices[stream]
        self.tally.missing += max(0, first_index - expected)
        self.tally.repeated += max(0, expected - first_index)
        self._indices[stream] = first_index + count
        if not self.tally.tokens:
            print("READY", flush=True)
        self.tally.tokens += count

    def _finish(self, stream: Any) -> None:
        request = self._running.pop(stream)
        seen = self._indices.pop(stream)
        self.tally.streams += 1
        try:
            result = stream.read()
        except ZmqEngineError as error:
            self.tally.errors.append(f"{error.code}: {error}")
            return
        self.tally.resumed += result.resumed
        if seen != len(result.tokens):
            self.tally.missing += len(result.tokens) - seen
        if self.job.fake is not None:
            expected = expected_tokens(request, FakeEngineConfig.from_json(self.job.fake))
            self.tally.missing += max(0, len(expected) - len(result.tokens))
            self.tally.wrong += result.tokens != expected
        else:
            self.tally.outputs[str(request.seed)] = result.tokens

    def _count_event(self, event: object) -> None:
        self.tally.restart_events += getattr(event, "kind", "") == "restarted"


class FrontEndProcess:
    """The test's side of it."""

    def __init__(self, job: Job) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.front_end", msgspec.json.encode(job).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_streaming(self) -> None:
        """Until its first tokens have come."""
        assert self._stdout.readline() == "READY\n"

    def finish(self, timeout_s: float = 100.0) -> Tally:
        """Let what runs end, and give the tally."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        # Not `communicate`: it does not see what `readline` has read beyond its line.
        hung = threading.Timer(timeout_s, self.process.kill)
        hung.start()
        out = self._stdout.read()
        hung.cancel()
        assert self.process.wait() == 0
        return msgspec.json.decode(out.splitlines()[-1], type=Tally)

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    @property
    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of many."""
    sum_ = Tally()
    for tally in tallies:
        for name in Tally.__struct_fields__:
            ours, theirs = getattr(sum_, name), getattr(tally, name)
            setattr(sum_, name, ours | theirs if isinstance(ours, dict) else ours + theirs)
    return sum_


def main() -> None:
    """Run the job of the command line."""
    front_end = FrontEnd(msgspec.json.decode(sys.argv[1], type=Job))

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        front_end.stop.set()

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    tally = front_end.run()
    sys.stdout.write("\n" + msgspec.json.encode(tally).decode() + "\n")
    sys.stdout.flush()
    # The reader of standard input may sit in a read that never ends.
    os._exit(0)


if __name__ == "__main__":
    main()
