"""Options from file, environment and command line; and the command itself, as a process."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.http.front import wait_until
from tests.support.ports import is_refused
from zmqengine.cli.commands.http import http
from zmqengine.cli.main import main
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.errors import ConfigError
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.config import load


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """Each source is heard where the stronger one is silent."""
    file = tmp_path / "http.toml"
    file.write_text(
        'workers = ["a", "b"]\nport = 1\nhost = "::1"\nlog_level = "debug"\n[aliases]\n"gpt-4o" = "a"\n'
    )
    environ = {
        "ZMQENGINE_HTTP_PORT": "2",
        "ZMQENGINE_HTTP_HOST": "0.0.0.0",
        "ZMQENGINE_HTTP_API_KEYS": "abcdefgh, ijklmnop",
    }
    config = load({"port": 3, "host": None, "workers": ()}, environ, file)
    assert (config.port, config.host, config.log_level) == (3, "0.0.0.0", "debug")
    assert (config.workers, config.aliases) == (("a", "b"), {"gpt-4o": "a"})
    assert config.api_keys == ("abcdefgh", "ijklmnop")
    assert load({}, {"ZMQENGINE_ADDRESS": "tcp://127.0.0.1:5"}).workers == ("tcp://127.0.0.1:5",)


@pytest.mark.parametrize(
    ("environ", "text", "said"),
    [
        ({"ZMQENGINE_HTTP_PORT": "many"}, "", "environment"),
        ({"ZMQENGINE_HTTP_PORT": "70000"}, "", "environment"),
        ({"ZMQENGINE_HTTP_ALIASES": "x"}, "", "NAME=MODEL"),
        ({}, "colour = 1", "colour"),
        ({}, "port = ", "http.toml"),
        ({}, "port = 70000", "http.toml: --port is 70000: it must be from 0 to 65535"),
        ({}, "choices_max = 0", "--choices-max is 0: it must be at least 1"),
        ({}, 'api_keys = ["short"]', "--api-key must have at least 8 characters"),
        ({}, 'log_prompts = "maybe"', "log_prompts"),
    ],
)
def test_what_is_wrong_is_said_with_its_source(
    tmp_path: Path, environ: dict[str, str], text: str, said: str
) -> None:
    """One line names the file or the environment, and the option."""
    file = tmp_path / "http.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load({}, environ, file)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_printed_configuration_can_be_read_back(tmp_path: Path) -> None:
    """All of it but the keys, which are not shown."""
    config = HttpConfig(
        workers=("a", "b"), port=1234, aliases={"x": "y"}, api_keys=("a-secret-key",), log_prompts=True
    )
    file = tmp_path / "http.toml"
    file.write_text(config.to_toml())
    assert "a-secret-key" not in config.to_toml()
    again = load({"api_keys": config.api_keys}, {}, file)
    assert again == config


def test_every_option_is_a_flag() -> None:
    """And no flag is anything else, but for the two about the file."""
    fields = {field.name for field in dataclasses.fields(HttpConfig)}
    assert {option.name for option in http.params} == fields | {"path", "print_config"}


def test_print_config_prints_and_ends() -> None:
    """Options and environment are in it."""
    result = CliRunner().invoke(
        http, ["--worker", "w", "--alias", "a=b", "--print-config"], env={"ZMQENGINE_HTTP_PORT": "99"}
    )
    assert result.exit_code == 0, result.output
    assert 'workers = ["w"]' in result.output
    assert "port = 99" in result.output
    assert 'aliases = { "a" = "b" }' in result.output


def test_a_wrong_option_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback at a user."""
    for arguments in (
        ["--alias", "x"],
        ["--config", str(tmp_path / "none")],
        ["--host", "256.1.1.1", "--port", "0"],
        ["--worker", "no address"],
        ["--client-key", "mine"],
        ["--client-key", "mine", "--server-key", "theirs"],
    ):
        assert main(["http", *arguments]) == 2
        written = capsys.readouterr().err
        assert written.startswith("zmqengine: ")
        assert written.count("\n") == 1


def command(worker: FakeWorker) -> list[str]:
    """`zmqengine http` on a free port."""
    return [sys.executable, "-m", "zmqengine.cli.main", "http", "--worker", worker.address, "--port", "0"]


@pytest.fixture
def process(worker: FakeWorker) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`zmqengine http` on a free port, and the address that it said it listens on."""
    with subprocess.Popen(command(worker), stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        url = ""
        for line in running.stderr:
            event = json.loads(line)
            url = event.get("url", url)
            if event["event"] == "worker" and event["state"] == "ready":
                break
        yield running, url
        running.kill()


def test_the_command_serves_and_ends_at_sigterm(process: tuple[subprocess.Popen[str], str]) -> None:
    """Two commands, a worker and this one, and any tool can ask; SIGTERM ends it with 0."""
    running, url = process
    with urllib.request.urlopen(url + "/ready", timeout=60) as reply:
        assert reply.status == 200
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_what_still_runs_at_the_end_is_ended_as_its_api_says(signals: int) -> None:
    """At the end of the drain time, or at a second signal: it was a 500 in plain text, or a stream cut short."""
    with FakeWorker(FakeEngineConfig(step_ms=1, context_tokens=10_000_000), process=True) as worker:
        drain = [] if signals == 2 else ["--drain-ms", "1"]
        with subprocess.Popen([*command(worker), *drain], stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr
            events = (json.loads(line) for line in running.stderr)
            port = int(next(event["url"] for event in events if "url" in event).rpartition(":")[2])
            assert any(event.get("state") == "ready" for event in events)
            body = {"model": "fake", "max_tokens": 9_000_000, "messages": [{"role": "user", "content": "a"}]}
            asked = [("/v1/chat/completions", False), ("/v1/chat/completions", True), ("/v1/messages", True)]
            replies = []
            for path, stream in asked:
                connection = HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", path, json.dumps({**body, "stream": stream}))
                replies.append(connection)
            unsent = HTTPConnection("127.0.0.1", port, timeout=60)
            unsent.putrequest("POST", "/v1/messages")
            unsent.putheader("content-length", "10")
            unsent.endheaders()
            streams = [connection.getresponse() for connection in replies[1:]]
            assert all(stream.readline() for stream in streams)
            running.send_signal(signal.SIGTERM)
            if signals == 2:
                wait_until(
                    lambda: is_refused(port), "it takes no further connection: it has the first signal"
                )
                running.send_signal(signal.SIGTERM)
            whole = replies[0].getresponse()
            assert whole.status == 503
            assert json.loads(whole.read())["error"]["code"] == "shutdown"
            assert json.loads(unsent.getresponse().read())["type"] == "error"
            openai, anthropic = (stream.read() for stream in streams)
            assert b'"code":"shutdown"' in openai
            assert b"event: error" in anthropic
            assert running.wait(60) == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sees_chunks_one_by_one() -> None:
    """Events arrive while the answer is far from its end."""
    with FakeWorker(FakeEngineConfig(step_ms=1, context_tokens=1_000_000), process=True) as worker:
        command = [
            sys.executable,
            "-m",
            "zmqengine.cli.main",
            "http",
            "--worker",
            worker.address,
            "--port",
            "0",
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr
            events = (json.loads(line) for line in running.stderr)
            url = next(event["url"] for event in events if "url" in event)
            assert any(event.get("state") == "ready" for event in events)
            body = '{"prompt": [1], "max_tokens": 900000, "stream": true, "ignore_eos": true}'
            curl = subprocess.Popen(
                ["curl", "-sN", url + "/v1/completions", "-d", body], stdout=subprocess.PIPE
            )
            assert curl.stdout
            lines = [curl.stdout.readline() for _ in range(10)]
            assert all(line.startswith(b"data: {") for line in lines[::2])
            assert curl.poll() is None
            curl.kill()
            curl.wait(60)
            running.terminate()
            assert running.wait(60) == 0


def test_a_network_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless told by name; the message says how."""
    assert main(["http", "--host", "0.0.0.0", "--port", "0"]) == 2
    written = capsys.readouterr().err
    assert "--api-key" in written
    assert "--insecure-no-key" in written


def test_a_network_without_a_key_is_served_if_told_so(worker: FakeWorker) -> None:
    """With a warning in the log."""
    arguments = [*command(worker), "--host", "0.0.0.0", "--insecure-no-key"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        # The third says that the worker is ready: by then signals are heard.
        lines = [json.loads(running.stderr.readline()) for _ in range(3)]
        running.terminate()
        assert running.wait(60) == 0
    assert [line["level"] for line in lines[:2]] == ["warning", "info"]
    assert lines[1]["url"].startswith("http://0.0.0.0:")
