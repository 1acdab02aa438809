"""Two launchers behind one real SMG gateway: one address for the models of both, also when one of them is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")

from tests.serve.launching import LauncherProcess, fake, toml
from tests.serve.test_http import Answer
from tests.support.ports import free_port
from tests.support.workers import START_S, wait_until

pytestmark = pytest.mark.process

STREAMS = 32
STEP_MS = 20
TOKENS = 600


class Gateway:
    """`smg launch` without any worker of its own."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["--enable-igw", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        arguments += ["--health-check-interval-secs", "1", "--policy", "round_robin"]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smg", "launch", *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    def close(self) -> None:
        self._process.kill()
        self._process.wait(START_S)

    def call(self, method: str, path: str, body: object = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            try:
                data = response.read()
            except http.client.IncompleteRead as error:
                data = error.partial
            return Answer(response.status, dict(response.getheaders()), data)
        finally:
            connection.close()

    def workers(self) -> set[str]:
        """The URLs of healthy workers."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            listed = self.call("GET", "/workers").json["workers"]
            return {worker["url"] for worker in listed if worker["is_healthy"]}
        return set()

    def complete(self, model: str, **more: Any) -> Answer:
        body = {"model": model, "prompt": "Hello", "max_tokens": 4, "seed": 1, "ignore_eos": True}
        return self.call("POST", "/v1/completions", body | more)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """Up, and without workers."""
    gateway = Gateway(tmp_path / "smg.log")

    def is_up() -> bool:
        with contextlib.suppress(OSError):
            return gateway.call("GET", "/workers").status == 200
        return False

    try:
        wait_until(is_up, "the gateway does not start")
        yield gateway
    finally:
        gateway.close()


@contextlib.contextmanager
def machine(gateway: Gateway, models: dict[str, dict[str, Any]]) -> Iterator[tuple[LauncherProcess, str]]:
    """A launcher that registers itself; and its URL."""
    port = free_port()
    arguments = ["--port", str(port), "--gateway", gateway.url]
    with LauncherProcess(toml(models, memory="8G"), *arguments, http=True) as launched:
        yield launched, f"http://127.0.0.1:{port}"


def end_all(launched: LauncherProcess) -> None:
    """As a machine that loses its power: no process of it says another word."""
    for process in launched.all_processes():
        process.kill()
        process.wait(START_S)


@pytest.mark.slow
def test_two_launchers_have_one_address_and_one_may_die(gateway: Gateway) -> None:
    """Half of 32 streams run on a machine that is killed: those are cut, which the gateway does not resume; no other is
    touched, and requests from then on are served by the machine that is left."""
    shared = fake(1, step_ms=STEP_MS, vocab_size=20_000)
    with (
        machine(gateway, {"shared": shared, "left": fake(1)}) as (one, one_url),
        machine(gateway, {"shared": shared, "right": fake(1)}) as (two, two_url),
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        wanted = {f"{one_url}/only/{name}" for name in ("shared", "left")}
        wanted |= {f"{two_url}/only/{name}" for name in ("shared", "right")}
        wait_until(lambda: gateway.workers() == wanted, "the machines are not registered")
        names = {card["id"] for card in gateway.call("GET", "/v1/models").json["data"]}
        assert names == {"shared", "left", "right"}
        for name in ("left", "right", "shared", "shared"):
            assert gateway.complete(name).status == 200

        expected = gateway.complete("shared", max_tokens=TOKENS).json["choices"][0]["text"]
        streams = [
            threads.submit(gateway.complete, "shared", max_tokens=TOKENS, stream=True) for _ in range(STREAMS)
        ]

        def running(url: str) -> int:
            # Asked over HTTP: a command starts so slowly on a busy machine that the streams would be over.
            with urllib.request.urlopen(f"{url}/v1/models/shared", timeout=START_S) as answer:
                return int(json.load(answer)["zmqengine"]["requests"])

        def all_run() -> bool:
            # Each of them has a machine now: one that came after the count could be cut without being counted.
            on_each = running(one_url), running(two_url)
            return min(on_each) >= 8 and sum(on_each) == STREAMS

        wait_until(all_run, "the streams are not on both machines")
        on_one = running(one_url)
        end_all(one)
        answers = [stream.result(START_S) for stream in streams]
        texts = [text_of(answer) for answer in answers]
        whole = [text for text, ended in texts if ended]
        cut = [text for text, ended in texts if not ended]
        assert len(whole) >= STREAMS - on_one
        assert all(text == expected for text in whole)
        assert all(expected.startswith(text) for text in cut)
        assert all(
            b"stream_error" in answer.body
            for answer, (_, ended) in zip(answers, texts, strict=True)
            if not ended
        )

        # From then on: the gateway tries the machine that is left.
        wait_until(
            lambda: gateway.workers() <= wanted and gateway.complete("shared").status == 200, "none is left"
        )
        later = [threads.submit(gateway.complete, "shared") for _ in range(STREAMS)]
        assert [answer.result(START_S).status for answer in later] == [200] * STREAMS
        assert gateway.complete("left").status >= 400
        assert two.terminate() == 0
        assert f"{two_url}/only/right" not in gateway.workers()
        print(f"{STREAMS} streams, {on_one} on the killed machine: {len(whole)} whole, {len(cut)} cut")


def text_of(answer: Answer) -> tuple[str, bool]:
    """The text of a stream, and whether it is whole. The gateway ends a stream with `[DONE]` also where its worker was
    lost, after an event with an error and without a `finish_reason`."""
    text, is_whole = "", False
    for line in answer.body.decode(errors="replace").split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice.get("text", "")
                is_whole = is_whole or choice.get("finish_reason") is not None
    return text, is_whole
