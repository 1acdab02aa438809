"""A machine on which MLX cannot compute: one sentence and code 78, and nobody tries again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.workers import WorkerProcess
from zmqengine.config import WorkerConfig
from zmqengine.engine.host.machine_probe import Probe
from zmqengine.worker.open_engine import open_engine
from zmqengine.worker.process.parent import EXIT_HOPELESS

pytest.importorskip("mlx.core")


@pytest.mark.parametrize("supervise", [pytest.param(True, marks=pytest.mark.process), False])
def test_a_worker_without_a_device_says_so_once(
    supervise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx #2691: without a Metal device importing MLX aborts. The process that does so is the probe."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text(
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "open(os.environ['TEST_TRIES'], 'a').write('x')\n"
        "sys.stderr.write('Terminating app due to uncaught exception NSRangeException\\n')\n"
        "sys.stderr.flush()\n"
        "os.abort()\n"
    )
    monkeypatch.setenv("TEST_TRIES", str(tmp_path / "tries"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *_python_path()]))
    with WorkerProcess(None, supervise=supervise, restart_wait_ms=1) as worker:
        assert worker.process.wait(60) == EXIT_HOPELESS
        assert worker.log.count("no Metal device: log in") == 1
        assert "Traceback" not in worker.log
        assert "starting it again" not in worker.log
    assert (tmp_path / "tries").read_text() == "x"


def test_a_probe_without_an_answer_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no proof; the model is loaded."""
    slow = Probe(None, "MLX did not answer in 120 s", is_certain=False)
    monkeypatch.setattr("zmqengine.worker.open_engine.probe_machine", lambda **_: slow)
    opened = open_engine(WorkerConfig(warm_up_s=0, speculate="off"), lambda stage, fraction: None, probe=True)
    opened.close()
    assert "did not answer" in caplog.text


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
