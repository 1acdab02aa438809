"""From options to a warmed-up engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.constrained import Pico
from zmqengine.config import WorkerConfig
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeEngineError, FakeFault
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.errors import ConfigError, ModelLoadError
from zmqengine.pico import model_path
from zmqengine.worker import main as worker_main
from zmqengine.worker.main import frame_bound
from zmqengine.worker.open_engine import open_engine, warm_up
from zmqengine.worker.process.wakeup import Wakeup
from zmqengine.worker.scheduler.memory_ledger import MemoryLedger
from zmqengine.worker.telemetry.shared_status import SharedStatus


def _no_report(stage: str, fraction: float | None) -> None:
    """Nobody listens."""


def test_warm_up_makes_a_step_and_leaves_nothing() -> None:
    """After it the engine has stepped and is empty."""
    engine = FakeEngine()
    warm_up(engine)
    stats = engine.stats()
    assert stats.generated_tokens == 2
    assert stats.rows_decoding + stats.rows_prefilling == 0


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_warm_up_row_is_removed_when_a_step_raises(step: int) -> None:
    """smg #1427 review: the warm-up probe leaked when a step raised. Here it is removed in a `finally`."""
    engine = FakeEngine(FakeEngineConfig(faults=(FakeFault(place="next", action="raise", index=step),)))
    with pytest.raises(FakeEngineError):
        warm_up(engine)
    assert engine.stats().rows_decoding + engine.stats().rows_prefilling == 0
    assert [call.method for call in engine.calls].count("remove") == 1


@pytest.mark.parametrize("place", ["insert", "prefill", "token"])
def test_a_warm_up_row_that_fails_is_a_failed_start(place: Literal["insert", "prefill", "token"]) -> None:
    """smg #1427 review: construction failed and the server said SERVING. A warm-up that fails is an error."""
    engine = FakeEngine(FakeEngineConfig(faults=(FakeFault(place=place, action="fail"),)))
    with pytest.raises(RuntimeError, match="warm-up"):
        warm_up(engine)
    assert engine.stats().rows_decoding + engine.stats().rows_prefilling == 0


def test_a_wrong_fake_engine_is_one_error() -> None:
    """The JSON of a fake engine is checked like any option."""
    with pytest.raises(ConfigError, match="colour"):
        open_engine(WorkerConfig(engine='fake:{"colour": 1}'), _no_report)


@pytest.mark.parametrize("config", [WorkerConfig(model="/nowhere"), WorkerConfig(draft="/nowhere")])
def test_a_model_that_is_not_there_is_refused_before_the_engine_is_imported(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits seconds for MLX to hear of a typing mistake."""
    monkeypatch.setitem(sys.modules, "zmqengine.engine.open", None)
    with pytest.raises(ModelLoadError, match="no directory /nowhere"):
        open_engine(config, _no_report)


def test_a_bundled_model_drafts_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--model` takes it, and as the launcher reckons with it: the import of the engine comes next."""
    monkeypatch.setitem(sys.modules, "zmqengine.engine.open", None)
    with pytest.raises(ImportError, match=r"engine\.open"):
        open_engine(WorkerConfig(draft="pico"), _no_report)


def test_a_memory_limit_that_the_weights_fill_is_refused() -> None:
    """What is left beside the weights is the budget for caches; nothing left is an error that says what to do."""
    engine = FakeEngine(FakeEngineConfig(kv_bytes_token=1, parameter_bytes=100))
    assert MemoryLedger(engine, limit_bytes=1000, prompt_cache_share=0).kv_bytes_max == 800
    heavy = FakeEngine(FakeEngineConfig(kv_bytes_token=1, parameter_bytes=900))
    with pytest.raises(ConfigError, match="--memory-limit"):
        MemoryLedger(heavy, limit_bytes=1000, prompt_cache_share=0)


def test_the_frame_bound_has_room_for_every_insert_that_fits_the_context() -> None:
    """The longest prompt and emitted, with the largest ids and every other field full, are within the bound."""
    from zmqengine.protocol.codec import encode
    from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Constraint, Insert
    from zmqengine.sampling_params import Sampling

    context = 5000
    insert = Insert(
        call=2**63 - 1,
        request="\U0001f600" * 64,
        epoch=bytes(8),
        prompt=[2**31 - 1] * context,
        emitted=[2**31 - 1] * context,
        max_tokens=context,
        sampling=Sampling(logit_bias={2**31 - 1 - index: -99.5 for index in range(1024)}),
        seed=2**63 - 1,
        stop_token_ids=[2**31 - 1] * 128,
        constraint=Constraint("regex", "\U0001f600" * CONSTRAINT_CHARS_MAX, after=[2**31 - 1] * 16),
    )
    assert len(encode(insert)[1]) <= frame_bound(context)


def test_the_warm_up_compiles_what_applies_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a machine, that takes a second, and all rows would wait for the first request with a constraint."""
    applied = []
    apply = MaskFiller.apply
    monkeypatch.setattr(
        MaskFiller, "apply", lambda filler, logits, bits: applied.append(bits) or apply(filler, logits, bits)
    )
    engine = Pico().engine()
    warm_up(engine)
    assert applied
    assert engine.stats().rows_decoding == engine.stats().rows_prefilling == 0


@pytest.mark.parametrize(
    ("metal", "prefill_ms", "warns"), [(True, 0, True), (True, 200, False), (False, 0, False)]
)
def test_chunks_without_a_bound_in_time_are_a_warning_on_metal(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    metal: bool,
    prefill_ms: float,
    warns: bool,
) -> None:
    """mlx #3267: macOS ends a command buffer after 5 s."""
    mx = pytest.importorskip("mlx.core")
    from zmqengine.engine.open import open_mlx_engine

    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: 0)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 32})
    options = WorkerConfig(warm_up_s=0, prefill_ms=prefill_ms, speculate="off")
    open_mlx_engine(str(model_path("pico")), options).engine.close()
    assert ("--prefill-ms 0" in caplog.text) == warns


@pytest.mark.parametrize(
    ("model", "tf32", "inherited", "told"),
    [
        ("pico", False, None, "0 (set here)"),
        pytest.param("pico", True, None, "1 (set you)", marks=pytest.mark.process),
        pytest.param("pico-embed", False, None, "1 (set here)", marks=pytest.mark.process),
        ("pico-embed", False, "0", "0 (set you)"),
    ],
)
def test_the_rounding_of_float32_is_the_workers_choice(
    model: str, tf32: bool, inherited: str | None, told: str
) -> None:
    """mlx #3860: MLX's own default rounds. Off unless asked for, on for encoders, and told in the worker's facts."""
    pytest.importorskip("mlx.core")
    program = (
        "import os\n"
        "from zmqengine.config import WorkerConfig\n"
        "from zmqengine.engine.host import environment\n"
        "environment.settings = lambda: list(environment._metal('Apple M5'))\n"
        "from zmqengine.worker.open_engine import open_engine\n"
        f"config = WorkerConfig(model={model!r}, warm_up_s=0, tf32={tf32}, speculate='off')\n"
        "told = open_engine(config, lambda stage, fraction: None).facts['MLX_ENABLE_TF32']\n"
        "assert told[0] == os.environ['MLX_ENABLE_TF32']\n"
        # A process that ends without closing its engine may lose what it has not written.
        "print(told, flush=True)\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    if inherited is not None:
        variables["MLX_ENABLE_TF32"] = inherited
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.strip() == told, ended.stderr


@pytest.mark.parametrize(
    ("platform", "restarts", "reason", "advised"),
    [
        ("darwin", 1, "[malloc] Unable to allocate 1073741824 bytes.", True),
        ("darwin", 0, "[malloc] Unable to allocate 1073741824 bytes.", False),
        ("linux", 1, "[malloc] Unable to allocate 1073741824 bytes.", False),
        ("darwin", 1, "shapes do not fit", False),
    ],
)
def test_a_model_that_finds_no_memory_after_a_hang_asks_to_restart_the_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, restarts: int, reason: str, advised: bool
) -> None:
    """omlx #15: the driver keeps what the process had; that no larger memory limit helps, nobody would guess."""

    def fails(*_: Any, **__: Any) -> Any:
        try:
            raise RuntimeError(reason)
        except RuntimeError as error:
            raise ModelLoadError("cannot load the model in m") from error

    monkeypatch.setattr(worker_main, "open_engine", fails)
    monkeypatch.setattr(sys, "platform", platform)
    status = SharedStatus(epoch=bytes(8), wakeup=Wakeup(), restarts=restarts)
    worker = worker_main.Worker(WorkerConfig(bind=f"ipc://{tmp_path}/ctl", engine="fake:"), status)
    with pytest.raises(ModelLoadError, match="cannot load the model in m") as raised:
        worker.run()
    assert ("Restart the Mac" in str(raised.value)) == advised
