"""`/metrics` over HTTP, against a worker that did a known amount of work."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.workers import wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client
from zmqengine_client.errors import ConfigError
from zmqengine_metrics.exporter import Exporter, WorkersCollector

WAIT_S = 60.0
Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """Ends no output early, so that every token can be foretold."""
    with FakeWorker(FakeEngineConfig(), process=True) as worker:
        yield worker


def fetch(address: str, path: str = "/metrics", key: str | None = None) -> str:
    """The body of an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def samples(text: str) -> Samples:
    """Values by sample name and its one label beside worker and model."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = dict(sample.labels)
            for name in ("worker", "engine", "model_name"):
                rest.pop(name, None)
            found[sample.name, next(iter(rest.values()), "")] = sample.value
    return found


def test_a_known_run_gives_known_numbers(worker: FakeWorker) -> None:
    """Three requests of 7 prompt tokens and 5, 6 and 7 of output."""
    with Client(worker.address, connect_timeout_s=WAIT_S) as client:
        exporter = Exporter(WorkersCollector([("w", client)]), "127.0.0.1", 0)
        try:
            before = samples(fetch(exporter.address))
            for length in (5, 6, 7):
                stream = client.generate_tokens([9, 8, 7, 6, 5, 4, 3], max_tokens=length, ignore_eos=True)
                assert sum(len(chunk.tokens) for chunk in stream) == length
            ended = "zmqengine_requests_ended_total", "length"
            wait_until(lambda: samples(fetch(exporter.address)).get(ended) == 3, "the ends were not told")
            after = samples(fetch(exporter.address))
        finally:
            exporter.close()

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    assert grown("zmqengine_tokens_total", "prompt") == 21
    assert grown("zmqengine_tokens_total", "generated") == 18
    assert grown("vllm:generation_tokens_total") == 18
    assert grown("zmqengine_requests_accepted_total") == 3
    for name in ("time_to_first_token", "queue", "prefill", "request"):
        assert grown(f"zmqengine_{name}_seconds_count") == 3
        assert grown(f"zmqengine_{name}_seconds_bucket", "+Inf") == 3
    assert grown("zmqengine_inter_token_seconds_count") == 4 + 5 + 6
    assert grown("zmqengine_request_prompt_tokens_sum") == 21
    assert grown("zmqengine_request_prompt_tokens_bucket", "5") == 0
    assert grown("zmqengine_request_prompt_tokens_bucket", "10") == 3
    assert grown("zmqengine_request_output_tokens_bucket", "5") == 1
    assert after["zmqengine_up", ""] == 1
    assert after["zmqengine_requests_running", ""] == 0


def test_a_worker_that_dies_is_down_and_comes_back_up() -> None:
    """The exporter outlives it."""
    with (
        FakeWorker(process=True) as worker,
        Client(worker.address, connect_timeout_s=0.5, answer_timeout_s=0.5) as client,
    ):
        client.wait_ready(WAIT_S)
        exporter = Exporter(WorkersCollector([("w", client)]), "127.0.0.1", 0)
        try:
            # On a busy machine any answer may take longer than this client waits.
            wait_until(lambda: samples(fetch(exporter.address))["zmqengine_up", ""] == 1, "it is not up")
            series = re.search(r"zmqengine_up\{.*\}", fetch(exporter.address))
            worker.kill()
            wait_until(lambda: samples(fetch(exporter.address))["zmqengine_up", ""] == 0, "it still answers")
            assert series
            assert f"{series[0]} 0.0" in fetch(exporter.address)
            worker.start()
            wait_until(
                lambda: samples(fetch(exporter.address))["zmqengine_up", ""] == 1, "it did not come back"
            )
        finally:
            exporter.close()


def test_a_key_is_asked_for_and_nothing_else_is_served(worker: FakeWorker) -> None:
    """Without it 401; other paths 404."""
    with Client(worker.address, connect_timeout_s=WAIT_S) as client:
        exporter = Exporter(WorkersCollector([("w", client)]), "127.0.0.1", 0, key="secret")
        try:
            assert "zmqengine_up" in fetch(exporter.address, key="secret")
            for key, path, status in (
                (None, "/metrics", 401),
                ("wrong", "/metrics", 401),
                ("secret", "/", 404),
            ):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    fetch(exporter.address, path, key)
                assert refused.value.code == status
                refused.value.close()
        finally:
            exporter.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_no_port_is_open_to_others_without_a_key(host: str) -> None:
    """Refused before anything is bound."""
    with pytest.raises(ConfigError, match="give --key or"):
        Exporter(WorkersCollector([]), host, 0)


def test_the_command_prints_the_metrics_once(worker: FakeWorker) -> None:
    """For a look, or for a cron job with a text file collector."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "zmqengine.cli.main",
            "metrics",
            "--once",
            "-w",
            worker.address,
            "--timeout",
            "30",
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert samples(done.stdout)["zmqengine_ready", ""] == 1


def test_the_command_listens_until_it_is_told_to_stop(worker: FakeWorker) -> None:
    """It says where, on standard error."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zmqengine.cli.main",
            "metrics",
            "--listen",
            "127.0.0.1:0",
            "-w",
            worker.address,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("metrics at http://127.0.0.1:")
        assert "zmqengine_up" in fetch(line.split("//")[1].split("/")[0])
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stderr.close()


def test_an_address_that_cannot_be_used_is_bad_usage() -> None:
    """One line and code 2."""
    for listen in ("9464", "localhost:http", "0.0.0.0:0"):
        done = subprocess.run(
            [sys.executable, "-m", "zmqengine.cli.main", "metrics", "--listen", listen],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
