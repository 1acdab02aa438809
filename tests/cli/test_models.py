"""`zmqengine models`, `pull` and `doctor`, against a hub of our own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.conftest import COMMAND
from tests.cli.fake_hub import FakeHub
from zmqengine.cli.main import zmqengine
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.machine import Machine
from zmqengine.pico import BUNDLED, model_path

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """Has pico under a name of its own, with files that no worker needs."""
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors",
    )
    files = {name: (model_path() / name).read_bytes() for name in names}
    hub = FakeHub("owner/pico-copy", {**files, "pytorch_model.bin": b"x" * 1000, "README.md": b"# a card"})
    yield hub
    hub.close()


class Shell:
    """The command line with a hub and a cache of its own."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self._environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "ZMQENGINE_DIR": str(home / "d"), "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        # Models of other programs are those in this home alone.
        self._environment |= {"HOME": str(home), "OLLAMA_MODELS": str(home / "ollama")}
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "ZMQENGINE_ADDRESS"):
            self._environment.pop(name, None)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env=self._environment,
        )


@pytest.fixture
def shell(hub: FakeHub, tmp_path: Path) -> Shell:
    """Nothing fetched yet."""
    return Shell(hub, tmp_path)


def test_a_model_is_pulled_listed_and_found_fit(shell: Shell, hub: FakeHub) -> None:
    """Only the files that a model consists of; the directory on standard output, for scripts."""
    pulled = shell.run("pull", hub.model)
    assert pulled.returncode == 0, pulled.stderr
    directory = Path(pulled.stdout.strip())
    assert (directory / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not [path for path in hub.paths if "pytorch_model" in path]
    assert "qwen3" in pulled.stderr
    listed = {model["model"]: model for model in json.loads(shell.run("models", "--json").stdout)}
    assert set(listed) == {*BUNDLED, hub.model}
    assert listed[hub.model]["bytes"] == listed["pico"]["bytes"] > 3_000_000
    assert listed[hub.model]["fits"] is True
    table = shell.run("models", "--memory-limit", "1M").stdout
    assert table.count("too large") == len(BUNDLED) + 1
    seen = shell.run("doctor", "--model", hub.model)
    assert seen.returncode == 0, seen.stdout
    assert f"{hub.model}: qwen3" in seen.stdout


def test_models_of_other_programs_are_listed_with_what_mlx_can_load(shell: Shell, tmp_path: Path) -> None:
    """LM Studio's directories, and why Ollama's files are of no use."""
    lm_studio = tmp_path / ".lmstudio" / "models"
    shutil.copytree(model_path(), lm_studio / "maker" / "pico-mlx")
    (lm_studio / "maker" / "old").mkdir()
    (lm_studio / "maker" / "old" / "old.gguf").write_bytes(b"GGUF")
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "llama3" / "8b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "size": 4_000_000_000, "digest": "sha256:0"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    listed = {model["model"]: model for model in json.loads(shell.run("models", "--json").stdout)}
    assert listed["maker/pico-mlx"]["need_bytes"] > listed["maker/pico-mlx"]["bytes"]
    assert listed["maker/pico-mlx"]["directory"] == str(lm_studio / "maker" / "pico-mlx")
    assert "GGUF" in listed["maker/old"]["error"]
    assert "GGUF" in listed["llama3:8b"]["error"]
    assert listed["llama3:8b"]["bytes"] == 4_000_000_000
    table = shell.run("models", "--memory-limit", "8G").stdout
    assert re.search(r"llama3:8b +Ollama .*it is a GGUF file", table)


def test_a_download_that_broke_off_goes_on(shell: Shell, hub: FakeHub) -> None:
    """Whether within the first run or by the second, every byte arrives."""
    hub.broken = {"model.safetensors"}
    first = shell.run("pull", hub.model)
    pulled = first if first.returncode == 0 else shell.run("pull", hub.model)
    assert pulled.returncode == 0, pulled.stderr
    assert (Path(pulled.stdout.strip()) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not hub.broken


@pytest.mark.parametrize(("model", "code"), [("owner/none", 1), ("not-an-id", 2)])
def test_a_model_that_is_not_there_is_one_line(shell: Shell, model: str, code: int) -> None:
    """With what to do."""
    pulled = shell.run("pull", model)
    assert pulled.returncode == code
    assert len(pulled.stderr.splitlines()) == 1, pulled.stderr
    assert pulled.stdout == ""


def test_the_doctors_code_is_for_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1 for what failed; warnings only if asked; JSON for programs."""
    monkeypatch.setenv("ZMQENGINE_DIR", str(tmp_path / "d"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
    well = Machine([Finding("ok", "python", "Python")], 8 << 30)
    monkeypatch.setattr("zmqengine.cli.commands.doctor.look_at_machine", lambda: well)

    def doctor(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(zmqengine, ["doctor", *arguments], standalone_mode=False)
        assert ended.exception is None, ended.exception
        return int(ended.return_value), ended.output

    assert doctor("--model", "owner/none")[0] == 0
    assert doctor("--model", "owner/none", "--strict")[0] == 1
    code, output = doctor("--memory-limit", "1M", "--json")
    levels = {finding["subject"]: finding["level"] for finding in json.loads(output)}
    assert (code, levels["fits"], levels["python"]) == (1, "fail", "ok")
