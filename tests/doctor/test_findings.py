"""Each fault that the doctor knows, made on purpose."""

from __future__ import annotations

import http.server
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import zmqengine
from zmqengine.doctor import machine, workers
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.front_ends import look_at_front_end
from zmqengine.doctor.model import look_at_model
from zmqengine.doctor.socket_directory import look_at_sockets
from zmqengine.doctor.workers import look_at_worker
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker

GIB = 1 << 30


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of named workers of this test."""
    with tempfile.TemporaryDirectory(prefix="zmqe-", dir="/tmp") as directory:
        path = Path(directory) / "d"
        monkeypatch.setenv("ZMQENGINE_DIR", str(path))
        monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
        yield path


def bad(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    """Level and subject of what is not well; each of those says what to do."""
    found = [finding for finding in findings if finding.level != "ok"]
    for finding in found:
        assert finding.advice or ":" in finding.text, finding
        assert "\n" not in finding.line
    return [(finding.level, finding.subject) for finding in found]


def test_a_machine_that_works_has_no_fault() -> None:
    """This one; MLX is asked in a process of its own."""
    pytest.importorskip("mlx.core")
    looked = machine.look_at_machine()
    assert not [finding for finding in looked.findings if finding.level == "fail"]
    assert {"python", "clock", "mlx", "mlx-lm", "memory"} <= {finding.subject for finding in looked.findings}
    assert looked.limit_bytes > 0


def test_an_mlx_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken wheel or a missing driver ends the probe, not the doctor."""
    pytest.importorskip("mlx.core")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libcuda.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    looked = machine.look_at_machine()
    (fault,) = [finding for finding in looked.findings if finding.level == "fail"]
    assert "libcuda.so.1" in fault.line
    assert "pip install" in fault.line
    assert looked.limit_bytes == 0


def test_a_clock_that_is_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the hub's certificates are blamed."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert bad(machine._clock()) == [("fail", "clock")]


def test_a_slow_blas_and_little_memory_are_warnings() -> None:
    """Things work, and could work better."""
    assert bad(machine._blas("reference (slow: ...)")) == [("warn", "blas")]
    assert bad(machine._blas("libopenblas.so.0")) == []
    report = {"system_bytes": GIB, "recommended_bytes": GIB // 2}
    assert bad(machine._memory(report)) == [("warn", "memory")]


def test_socket_directories_are_looked_at(base: Path) -> None:
    """Not there yet, well, with a worker that others may enter, with a file in its place."""
    assert bad(look_at_sockets()) == []
    base.mkdir(mode=0o755)
    assert bad(look_at_sockets()) == []
    (base / "w").mkdir(mode=0o755)
    assert bad(look_at_sockets()) == [("fail", "sockets")]
    (base / "w").rmdir()
    base.rmdir()
    base.touch()
    assert bad(look_at_sockets()) == [("fail", "sockets")]
    base.unlink()


def test_a_path_that_is_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets have 103 bytes."""
    monkeypatch.setenv("ZMQENGINE_DIR", "/tmp/" + "x" * 120)
    monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
    assert bad(look_at_sockets()) == [("fail", "sockets")]


def test_the_sockets_of_a_dead_worker_are_stale_and_those_of_a_live_one_are_not(base: Path) -> None:
    """Told apart by whether somebody listens."""
    directory = base / "w"
    directory.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "ctl"))
        listener.listen()
        assert bad(look_at_sockets()) == []
    assert bad(look_at_sockets()) == [("warn", "stale sockets")]


def test_a_worker_that_answers_is_well_and_one_that_does_not_is_a_fault_only_if_it_was_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to run a worker."""
    monkeypatch.setattr("zmqengine.doctor.workers.ANSWER_S", 0.3)
    assert bad(look_at_worker(None, None, required=False)) == []
    assert bad(look_at_worker("other", None, required=True)) == [("fail", "worker")]
    assert bad(look_at_worker("no/such", None, required=True)) == [("fail", "worker")]
    assert bad(look_at_worker("tcp://192.0.2.1:5555", None, required=True)) == [("fail", "keys")]
    monkeypatch.setattr("zmqengine.doctor.workers.ANSWER_S", 60.0)
    with FakeWorker(FakeEngineConfig()) as worker:
        assert bad(look_at_worker(worker.address, None, required=True)) == []


def test_models_are_looked_at_before_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, no model, too large, too long a context, well."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert bad(look_at_model("pico", 8 * GIB)) == []
    assert bad(look_at_model("pico", 1 << 20)) == [("fail", "fits")]
    assert bad(look_at_model("pico", 6 << 20)) == [("fail", "fits")]
    assert ("warn", "model") in bad(look_at_model("owner/name", GIB))
    assert bad(look_at_model(str(tmp_path / "none"), GIB)) == [("fail", "model")]
    assert bad(look_at_model(str(tmp_path), GIB)) == [("fail", "model")]
    config = {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "hidden_size": 1024,
        "max_position_embeddings": 1 << 20,
    }
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "whisper"}))
    (found,) = look_at_model(str(tmp_path), GIB)
    # Without the extra mlx-vlm a hint follows.
    assert found.line.startswith(f"{tmp_path}: neither mlx-lm nor an encoder here reads a 'whisper'")
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert bad(look_at_model(str(tmp_path), GIB)) == [("fail", "tokenizer"), ("warn", "fits")]


def test_a_directory_without_the_right_to_write_is_told(base: Path) -> None:
    """Root may write everywhere, so this is for others."""
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    base.mkdir(mode=0o500)
    assert bad(look_at_sockets()) == [("fail", "sockets")]


def test_the_supported_releases_of_mlx_lm_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the metadata has them; nothing is said where there is none."""
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["mlx>=1", "mlx-lm<=0.32.2,>=0.32.0; extra"]
    )
    assert machine.tested_mlx_lm() == ("0.32.0", "0.32.2")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    assert machine.tested_mlx_lm() == ("", "")


def test_a_wired_limit_beyond_the_weights_is_a_warning() -> None:
    """mlx #3186: macOS panics. A worker without Metal says nothing of it."""
    assert list(workers._wired("")) == []
    assert bad(workers._wired("weights (4.10 GiB)")) == bad(workers._wired("off")) == []
    for told in ("all (48.00 GiB)", "12884901888 (12.00 GiB)"):
        assert bad(workers._wired(told)) == [("warn", "wired")]


def test_a_worker_that_gives_way_to_others_is_a_warning() -> None:
    """omlx #3706: on macOS 27 its work on the GPU ends as a timeout."""
    assert list(workers._kv_bits("")) == []
    assert [finding.text for finding in workers._kv_bits("8 bits in slots")] == ["8 bits in slots"]
    assert list(workers._nice("")) == []
    assert bad(workers._nice("5")) == [("warn", "nice")]


class Answers(http.server.BaseHTTPRequestHandler):
    """Whatever a program at the port may say, by path."""

    said: ClassVar[dict[str, tuple[int, object]]] = {}

    def do_GET(self) -> None:
        status, document = self.said.get(self.path, (404, {}))
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


US = {"name": "zmqengine", "version": zmqengine.__version__}
READY = {"workers": [{"model": "pico", "ready": True}]}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"/": (200, US), "/ready": (200, READY)}, []),
        ({"/": (200, US), "/ready": (503, {})}, [("warn", "front-end")]),
        ({"/": (200, US | {"version": "0.0"}), "/ready": (200, READY)}, [("warn", "version")]),
        ({"/": (200, {"name": "other"})}, [("warn", "front-end")]),
        ({"/": (200, US), "/ready": (200, {"odd": 1})}, [("warn", "front-end")]),
        ({}, [("warn", "front-end")]),
    ],
)
def test_a_front_end_is_looked_at(said: dict[str, tuple[int, object]], found: list[tuple[str, str]]) -> None:
    """What answers there, its version, and whether it has a worker."""
    handler = type("Handler", (Answers,), {"said": said})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        findings = list(look_at_front_end(url))
    finally:
        server.shutdown()
        server.server_close()
    assert bad(iter(findings)) == found
    assert bool(found) or "pico" in findings[0].text


def test_no_front_end_is_no_fault() -> None:
    """It is told how to start one."""
    (finding,) = look_at_front_end("http://127.0.0.1:9")
    assert finding.level == "ok"
    assert "zmqengine serve" in finding.text
