"""The gateway from PyPI in a process of its own, and adapters by the command that users run."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ports import free_port
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

MODEL = "fake"


class Reply(NamedTuple):
    """What the gateway answered."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body of a whole answer."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a streamed answer, which has to have come to its end."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", self.body[-500:]
        return [json.loads(line) for line in lines[:-1]]

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not."""
        assert self.status == 200, self.body
        if self.body.startswith(b"data: "):
            return "".join(event["choices"][0]["text"] for event in self.events if event["choices"])
        return str(self.json["choices"][0]["text"])


class RealGateway:
    """`smg launch` over adapters. It is killed at the end: its own way takes many seconds."""

    def __init__(self, worker_urls: Sequence[str], log: Path, *more: str) -> None:
        self.model = MODEL
        self.port = free_port()
        arguments = ["--worker-urls", *worker_urls, "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        arguments += ["--policy", "cache_aware"]
        arguments += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1", *more]
        self._command = [sys.executable, "-m", "smg", "launch", *arguments]
        self._log = log
        self._workers = len(worker_urls)
        self._process = self._start()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Reply:
        """One request; the model is filled in."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                content = json.dumps({"model": self.model} | body)
                connection.request("POST", path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Reply(response.status, response.read())
        finally:
            connection.close()

    def complete(self, prompt: str, **fields: Any) -> Reply:
        """A completion of five tokens unless `fields` say otherwise."""
        return self.ask("/v1/completions", {"prompt": prompt, "max_tokens": 5, "seed": 0} | fields)

    def wait_ready(self) -> None:
        """Until it serves, with all workers."""

        def ready() -> bool:
            with contextlib.suppress(OSError, ValueError):
                workers = self.ask("/workers").json["workers"]
                healthy = [worker for worker in workers if worker["is_healthy"]]
                return len(healthy) == self._workers and self.complete("Are you there?").status == 200
            return False

        wait_until(ready, f"the gateway does not get ready: {self._log}")

    def restart(self) -> None:
        """Kill it and start the next one at the same address."""
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.wait(60)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


class Fleet(NamedTuple):
    """A gateway and the two supervised workers behind it."""

    gateway: RealGateway
    workers: list[WorkerProcess]
    engine: FakeEngineConfig

    def requests_taken(self) -> list[int]:
        """How many requests each worker has accepted in its life."""
        taken = []
        for worker in self.workers:
            with worker.client() as client:
                taken.append(int(client.status().numbers["accepted"]))
        return taken


@contextlib.contextmanager
def fleet(engine: FakeEngineConfig) -> Iterator[Fleet]:
    """Two workers on the fake engine, an adapter to each, and the gateway, ready."""
    directory = Path(tempfile.mkdtemp(prefix="zmqe-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        workers = [stack.enter_context(WorkerProcess(engine)) for _ in range(2)]
        urls = []
        for number, worker in enumerate(workers):
            listen = f"127.0.0.1:{free_port()}"
            urls.append(f"grpc://{listen}")
            command = [sys.executable, "-m", "zmqengine.cli.main", "smg", "--worker", worker.address]
            command += ["--listen", listen]
            log = stack.enter_context((directory / f"adapter-{number}.log").open("wb"))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(_end, process)
        gateway = RealGateway(urls, directory / "gateway.log")
        stack.callback(gateway.kill)
        gateway.wait_ready()
        yield Fleet(gateway, workers, engine)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code == 0, f"the adapter ended with {code}"
