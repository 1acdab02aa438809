"""What only a fresh interpreter can show: imports, exits, forks, Ctrl-C."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.support.stderr import complaints
from tests.support.workers import wait_in_loop, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import (
    AsyncClient,
    AsyncTextStream,
    AsyncTokenStream,
    Client,
    ClientEvent,
    TextStream,
    TokenStream,
)

pytestmark = pytest.mark.process

HANG_S = 60.0


def run(program: str, *arguments: str, wait_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """A program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )


def test_the_client_never_imports_mlx_the_worker_or_an_engine(worker: FakeWorker) -> None:
    """A front-end runs where no MLX is installed: in a fresh interpreter, from import to text."""
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        refused = ("mlx", "mlx_lm", "transformers", "zmqengine.worker", "zmqengine.engine")
        if name.startswith(refused):
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
import zmqengine_client
with zmqengine_client.Client(sys.argv[1]) as client:
    print(len(client.chat([{"role": "user", "content": "hi"}], max_tokens=5, stop="zz").read().tokens))
"""
    done = run(program, worker.address)
    assert complaints(done.stderr) == []
    assert done.stdout == "5\n"


def methods(cls: type) -> dict[str, str]:
    """Public names with their parameters."""
    found = {}
    for name, member in inspect.getmembers(cls):
        if not name.startswith("_"):
            found[name] = str(inspect.signature(member).parameters) if callable(member) else "property"
    return found


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(Client, AsyncClient), (TokenStream, AsyncTokenStream), (TextStream, AsyncTextStream)],
)
def test_both_kinds_have_the_same_methods_with_the_same_parameters(sync: type, asynchronous: type) -> None:
    """Two thin halves over one core: names, parameters and defaults are compared."""

    def neutral(signatures: dict[str, str]) -> dict[str, str]:
        return {name: text.replace("AsyncStream", "Stream") for name, text in signatures.items()}

    assert neutral(methods(sync)) == neutral(methods(asynchronous))
    assert len(methods(sync)) > 5


def test_both_clients_are_made_with_the_same_arguments() -> None:
    """Names and defaults."""
    assert str(inspect.signature(Client).parameters) == str(inspect.signature(AsyncClient).parameters)


def test_a_program_that_ends_without_closing_ends_at_once_and_says_bye(worker: FakeWorker) -> None:
    """No hang at exit, and no row that runs on until the lease ends."""
    program = """
import sys
from zmqengine_client import Client
client = Client(sys.argv[1])
stream = client.generate_tokens([1], max_tokens=4000)
next(stream)
print("leaving")
"""
    started = time.monotonic()
    done = run(program, worker.address)
    assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)
    assert time.monotonic() - started < HANG_S / 2
    with Client(worker.address) as client:
        end = time.monotonic() + HANG_S
        while client.status().numbers["requests_held"]:
            assert time.monotonic() < end, "its request still runs"


def test_an_async_program_that_ends_without_closing_ends_at_once(worker: FakeWorker) -> None:
    """The loop is gone, the sockets go with the process."""
    program = """
import asyncio, sys
from zmqengine_client import AsyncClient
async def main():
    client = AsyncClient(sys.argv[1])
    stream = client.generate_tokens([1], max_tokens=4000)
    await stream.__anext__()
    print("leaving")
asyncio.run(main())
"""
    done = run(program, worker.address)
    assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)


def test_control_c_reaches_a_thread_that_waits_for_a_token() -> None:
    """Waiting never blocks signals: the main thread gets its KeyboardInterrupt."""
    program = """
import sys
from zmqengine_client import Client
with Client(sys.argv[1]) as client:
    stream = client.generate_tokens([1], max_tokens=4000)
    next(stream)
    try:
        print("waiting", flush=True)
        for _ in stream:
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(len(client.generate_tokens([2], max_tokens=3).read().tokens))
"""
    with FakeWorker(FakeEngineConfig(step_ms=50.0)) as worker:
        child = subprocess.Popen(
            [sys.executable, "-c", program, worker.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "waiting\n"
            child.send_signal(signal.SIGINT)
            out, errors = child.communicate(timeout=HANG_S)
        finally:
            child.kill()
        assert (out, errors, child.returncode) == ("interrupted\n3\n", "", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_client_says_that_it_does_not_survive_a_fork(worker: FakeWorker) -> None:
    """The child gets an error and not a hang; the parent's session lives on."""
    program = """
import os, sys
from zmqengine_client import Client
client = Client(sys.argv[1])
stream = client.generate_tokens([1], max_tokens=200)
next(stream)
pid = os.fork()
if pid == 0:
    try:
        for _ in stream:
            pass
    except RuntimeError as error:
        print(error, flush=True)
    try:
        client.describe()
    except RuntimeError as error:
        print(error, flush=True)
    with Client(sys.argv[1]) as own:
        print(len(own.generate_tokens([2], max_tokens=3).read().tokens), flush=True)
    client.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(len(stream.read().tokens), flush=True)
client.close()
"""
    done = run(program, worker.address)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a client does not survive a fork"] * 2 + ["3", "200"]
    assert done.returncode == 0


def test_a_client_that_nobody_holds_is_closed(worker: FakeWorker) -> None:
    """Its thread ends; while one of its streams is read it stays."""
    before = threading.active_count()
    stream = Client(worker.address).generate_tokens([1], max_tokens=50)
    assert threading.active_count() == before + 1
    assert len(stream.read().tokens) == 50
    del stream
    assert threading.active_count() == before


def test_waiting_inside_on_event_is_refused(worker: FakeWorker) -> None:
    """It would be a deadlock; the caller is told instead."""
    told: list[str] = []

    def on_event(event: ClientEvent) -> None:
        try:
            client.status()
        except RuntimeError as error:
            told.append(str(error))

    with Client(worker.address, on_event=on_event) as client:
        client.generate_tokens([1], max_tokens=1).read()
    assert told == ["on_event must not wait for the client that calls it: hand over to another thread"]


def test_a_front_end_that_is_stopped_for_a_while_gets_every_token() -> None:
    """SIGSTOP and SIGCONT: what was published meanwhile comes later, in larger chunks."""
    program = """
import sys
from zmqengine_client import Client
with Client(sys.argv[1]) as client:
    stream = client.generate_tokens([1], max_tokens=2000, seed=0)
    next(stream)
    print("streaming", flush=True)
    print(stream.read().tokens == eval(sys.stdin.readline()))
"""
    with FakeWorker(FakeEngineConfig(step_ms=1.0), process=True) as worker, Client(worker.address) as other:
        child = subprocess.Popen(
            [sys.executable, "-c", program, worker.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "streaming\n"
            child.send_signal(signal.SIGSTOP)
            wait_until(
                lambda: other.status().numbers["generated_tokens"] >= 2000,
                "the worker waits for the front-end",
            )
            # The others go on undelayed meanwhile.
            assert len(other.generate_tokens([2], max_tokens=50).read().tokens) == 50
            child.send_signal(signal.SIGCONT)
            out, _ = child.communicate(repr(worker.expected_tokens([1], 2000)) + "\n", timeout=HANG_S)
        finally:
            child.kill()
        assert out == "True\n"


def test_threads_share_one_client(worker: FakeWorker) -> None:
    """Many threads, each with streams of its own, over one session."""
    results: dict[int, list[int]] = {}
    with Client(worker.address) as client:

        def work(number: int) -> None:
            for _ in range(3):
                results[number] = client.generate_tokens([number], max_tokens=20, seed=0).read().tokens

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
    assert results == {number: worker.expected_tokens([number], 20) for number in range(1, 17)}


def test_an_async_client_leaves_the_loop_free(worker: FakeWorker) -> None:
    """vllm-mlx #479 review: 30 s of tokenising stopped everyone. Here a long prompt is tokenised off the loop."""

    async def scenario() -> None:
        async with AsyncClient(worker.address, answer_timeout_s=HANG_S) as client:
            tokenizer = await client.tokenizer()
            encode = type(tokenizer).encode
            entered, release = threading.Event(), threading.Event()

            def slow(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
                entered.set()
                assert release.wait(HANG_S), "the loop was blocked"
                return encode(self, text, add_special_tokens)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(tokenizer), "encode", slow)
                stream = client.generate("long", max_tokens=3)
                reading = asyncio.ensure_future(stream.read())
                await wait_in_loop(entered.is_set, "nothing is tokenised")
                other = await client.generate_tokens([1], max_tokens=20).read()
                assert len(other.tokens) == 20
                assert not reading.done()
                release.set()
                assert len((await reading).tokens) == 3

    asyncio.run(scenario())


def test_slow_tokenising_is_logged_with_the_request(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-mlx #479 review: id, tokens and seconds when it takes over a second."""
    from zmqengine_client.text import prompts

    monkeypatch.setattr(prompts, "SLOW_S", 0.0)
    with Client(worker.address) as client:
        client.generate("hello", max_tokens=1, request_id="slow-one").read()
    assert "request slow-one: tokenising 5 tokens took" in caplog.text
