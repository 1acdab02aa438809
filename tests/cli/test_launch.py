"""`zmqengine launch`: agents are pointed at a front-end that answers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.http.front import Front, serving, wait_until
from tests.http.scripted import ScriptedClient
from tests.support.eyes import CARD
from zmqengine.cli.launch_programs import PROGRAMS
from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http import HttpConfig

KEY = "a-long-enough-key"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    client = ScriptedClient(lambda prompt: "x", name="big", context_tokens=100_000)
    with serving(HttpConfig(api_keys=(KEY,), aliases={"alias": "big"}), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module")
def seeing_front() -> Iterator[Front]:
    client = ScriptedClient(lambda prompt: "x", name="big", context_tokens=100_000)
    client.bundle = msgspec.structs.replace(client.bundle, vision=CARD)
    client._tokenizer = Tokenizer(client.bundle)
    with serving(HttpConfig(api_keys=(KEY,)), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        yield front


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zmqengine.cli.main", "launch", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def exports(printed: str) -> dict[str, str]:
    """What a shell makes of it."""
    script = printed + "\nenv -0"
    shown = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, env={"PATH": "/bin:/usr/bin"}
    )
    return dict(pair.split("=", 1) for pair in shown.stdout.split("\0") if pair)


@pytest.mark.process
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_gets_what_points_it_at_the_front_end(
    front: Front, tmp_path: Path, program: str
) -> None:
    """As lines that a shell can read; files go to a folder of our own."""
    done = run(
        program, "--url", front.url, "--api-key", KEY, XDG_CONFIG_HOME=str(tmp_path), HOME=str(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    told = done.stdout + written
    assert front.url in told
    assert "big" in told
    assert KEY in told
    assert "cache" in done.stdout
    assert exports(done.stdout)


def test_claude_is_told_the_context_and_to_keep_its_head(front: Front) -> None:
    """It would assume 200,000 tokens, and count them down in its prompt."""
    done = run("claude", "--url", front.url, "--api-key", KEY)
    environment = exports(done.stdout)
    assert environment["ANTHROPIC_BASE_URL"] == front.url
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "big"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "100000"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    settings = json.loads(shlex.split(done.stdout.split("# then: ")[1].split("\n")[0])[2])
    permissions = {"defaultMode": "default", "disableAutoMode": "disable"}
    assert settings == {"totalTokensReminder": "off", "permissions": permissions}


def test_codex_gets_a_catalogue_of_the_models(front: Front, tmp_path: Path) -> None:
    """Without one it guesses the context."""
    run("codex", "--url", front.url, "--api-key", KEY, XDG_CONFIG_HOME=str(tmp_path), HOME=str(tmp_path))
    (catalog,) = tmp_path.rglob("codex-models.json")
    model = json.loads(catalog.read_text())["models"][0]
    assert model["context_window"] == 100_000
    assert model["input_modalities"] == ["text"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("codex", '"input_modalities":["text","image"]'),
        ("continue", '"image_input"'),
        ("crush", '"supports_attachments": true'),
        ("pi", '"image"'),
        ("opencode", '"image"'),
        ("aider", '"supports_vision": true'),
        ("llm", "vision: true"),
    ],
)
def test_programs_that_ask_are_told_whether_the_model_sees(
    front: Front, seeing_front: Front, tmp_path: Path, program: str, said: str
) -> None:
    """They would keep images from a model of which they know nothing."""

    def told(front: Front, folder: Path) -> str:
        done = run(program, "--url", front.url, "--api-key", KEY, XDG_CONFIG_HOME=str(folder))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout + "".join(path.read_text() for path in folder.rglob("*") if path.is_file())

    assert said in told(seeing_front, tmp_path / "sees")
    assert said not in told(front, tmp_path / "blind")


def test_run_starts_the_program_with_all_that(front: Front, tmp_path: Path) -> None:
    """And with the arguments given to it."""
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL|$ANTHROPIC_AUTH_TOKEN|$*"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("claude", "--url", front.url, "--api-key", KEY, "--run", "--", "-p", "hi", PATH=path)
    url, key, arguments = done.stdout.strip().split("|")
    assert (url, key) == (front.url, KEY)
    assert arguments.endswith("-p hi")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "zmqengine http"),
        (["--api-key", "wrong-but-long"], "401"),
        (["--api-key", KEY, "--model", "other"], "only alias, big"),
        (["--api-key", KEY, "--run"], "npm install"),
    ],
)
def test_what_is_wrong_is_one_line_with_what_to_do(front: Front, arguments: list[str], words: str) -> None:
    """Nobody there, a wrong key, a wrong name, a program that is not installed."""
    done = run("claude", "--url", front.url, *arguments, PATH="/nowhere")
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_context_that_the_programs_own_prompt_fills_is_refused() -> None:
    """With both numbers: opencode would compact its conversation for ever. It may be tried anyway."""
    client = ScriptedClient(lambda prompt: "x")
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        for program, needed in (("opencode", "20000"), ("claude", "40000")):
            done = run(program, "--url", front.url)
            assert (done.returncode, done.stdout) == (1, "")
            assert "4096" in done.stderr
            assert needed in done.stderr
            assert "--anyway" in done.stderr
            assert run(program, "--url", front.url, "--anyway").returncode == 0


def test_a_model_without_tools_is_told(tmp_path: Path) -> None:
    """An agent can only talk with it; a program that needs none gets no complaint."""
    client = ScriptedClient(lambda prompt: "x", template=CHAT_TEMPLATE, context_tokens=100_000)
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        done = run("claude", "--url", front.url)
        assert done.returncode == 0
        assert "takes no tools" in done.stderr
        assert run("aider", "--url", front.url, XDG_CONFIG_HOME=str(tmp_path)).stderr == ""


def test_a_model_with_tools_and_room_is_chosen(tmp_path: Path) -> None:
    """Of three workers; by name the others come first."""
    clients = {
        "a": ScriptedClient(lambda prompt: "x", name="a", template=CHAT_TEMPLATE, context_tokens=100_000),
        "b": ScriptedClient(lambda prompt: "x", name="b"),
        "c": ScriptedClient(lambda prompt: "x", name="c", context_tokens=100_000),
    }
    config = HttpConfig(workers=tuple(clients))
    with serving(config, lambda address, on_event: clients[address.rpartition("/")[2]]) as front:
        wait_until(lambda: len(front.service.pool.models()) == 3, "all models are known")
        assert exports(run("claude", "--url", front.url).stdout)["ANTHROPIC_MODEL"] == "c"
        assert exports(run("aider", "--url", front.url, XDG_CONFIG_HOME=str(tmp_path)).stdout)
        assert "with a (" in run("aider", "--url", front.url, XDG_CONFIG_HOME=str(tmp_path)).stdout
