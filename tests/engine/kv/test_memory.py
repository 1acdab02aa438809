"""Projected bytes are those that a real row holds."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from tests.support.engines import make_engine, runner_of
from tests.support.models import LLAMA
from zmqengine.engine.host.device_memory import WiredMemory, recommended_bytes, system_bytes
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models import mlx_lm_caches as caches_of
from zmqengine.engine.speculation.build import open_speculator
from zmqengine.worker.scheduler.memory_ledger import WORKSPACE_SHARE


@pytest.mark.parametrize("kernels", ["auto", "mlx", "mlx-lm"])
@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
@pytest.mark.parametrize("tokens", [2, 300, 700])
def test_a_projection_is_what_one_row_holds(models, shape, tokens, kernels):
    """A slot of few capacities; of mlx-lm's caches, a window stops growing, and a state never grows."""
    engine = make_engine(runner_of(models[shape], kernels), prefill_chunk=64, prompt_cache_bytes=0)
    engine.insert([RowRequest(0, [5] * (tokens - 1), 9)])
    while not engine.stats().rows_decoding:
        engine.next()
    held, projected = engine.memory().kv, engine.project_bytes(tokens)
    token_bytes = 2 * LLAMA["num_key_value_heads"] * LLAMA["head_dim"] * 4
    layers = models[shape].args.num_hidden_layers
    if shape != "mamba" and kernels != "mlx-lm":
        assert held == projected == layers * token_bytes * (512 if tokens < 512 else 1024)
        # A verify block may need columns behind the last token.
        assert engine.project_bytes(512 - 8) == engine.project_bytes(1)
        assert engine.project_bytes(512 - 7) == 2 * engine.project_bytes(1)
    else:
        assert held <= projected <= held + 2 * 256 * layers * token_bytes
        if shape == "llama":
            assert projected == layers * token_bytes * (tokens + 256)


def test_a_window_caps_the_projection(models):
    """Of mlx-lm's caches: only the layers without a window grow for ever."""
    engine = make_engine(runner_of(models["sliding"], "mlx-lm"))
    near, far = engine.project_bytes(512), engine.project_bytes(1024)
    full = make_engine(runner_of(models["llama"], "mlx-lm"))
    # Both models have two layers that see everything.
    assert far - near == full.project_bytes(1024) - full.project_bytes(512)
    mamba = make_engine(models["mamba"])
    assert mamba.project_bytes(11) == mamba.project_bytes(2048) > 0


def test_a_cache_that_was_cut_grows_no_larger_than_one_that_was_not(model):
    """Cut back to a multiple of mlx-lm's step, it would keep what it has to spare and grow beside it."""

    def read(caches, tokens):
        caches_of.drop_slack(caches, len(tokens))
        model(mx.array([tokens]), cache=caches)

    step = KVCache.step
    cut, whole = make_prompt_cache(model), make_prompt_cache(model)
    read(cut, [5] * (step + 9))
    trim_prompt_cache(cut, 9)
    read(whole, [5] * step)
    for caches in (cut, whole):
        read(caches, [6] * (step + 1))
    assert caches_of.byte_count(cut) == caches_of.byte_count(whole)


def test_held_bytes_come_back_to_zero(models):
    """What the batch holds is told while it runs and gone afterwards."""
    engine = make_engine(models["llama"], prompt_cache_bytes=0)
    engine.insert([RowRequest(row, [5] * 100, 4) for row in range(4)])
    engine.next()
    held = engine.memory().kv
    assert held == 4 * engine.project_bytes(101)
    while engine.stats().rows_decoding or engine.stats().rows_prefilling:
        engine.next()
    assert engine.memory().kv == 0


def test_a_container_has_the_memory_of_its_control_group(tmp_path):
    """In a container the machine's memory is not ours."""
    limit = tmp_path / "memory.max"
    machine = system_bytes(limit)
    assert 0 < recommended_bytes() <= machine
    limit.write_text("max\n")
    assert system_bytes(limit) == machine
    limit.write_text("1000000\n")
    assert system_bytes(limit) == 1_000_000


def test_freed_buffers_are_kept_within_a_bound_that_fits_the_model() -> None:
    """vllm-mlx, measured: 5.5 GB resident for a 100 MB model. Buffers kept for reuse have a bound of their own."""
    from zmqengine.engine.host.device_memory import buffer_cache_bytes

    gib = 1 << 30
    if not mx.cuda.is_available():
        assert buffer_cache_bytes(64 * gib, 100 << 20) == 256 << 20
        assert buffer_cache_bytes(64 * gib, 8 * gib) == 2 * gib
        assert buffer_cache_bytes(gib, 8 * gib) == gib // (8 if mx.metal.is_available() else 16)
    else:
        assert buffer_cache_bytes(64 * gib, 8 * gib) == 8 * gib


class Driver:
    """The three calls of libcuda that keep memory mapped; the one at `failing` fails."""

    def __init__(self, failing: int) -> None:
        self._results = [0, 0, 0]
        self._results[failing:] = [3] if failing < 3 else []
        self.attributes: list[tuple[Any, int, int]] = []

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = 7 + number
        return self._results[0]

    def cuDeviceGetDefaultMemPool(self, pool: Any, device: Any) -> int:  # noqa: N802
        pool._obj.value = 1000 + device.value
        return self._results[1]

    def cuMemPoolSetAttribute(self, pool: Any, attribute: int, value: Any) -> int:  # noqa: N802
        self.attributes.append((pool.value, attribute, value._obj.value))
        return self._results[2]


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_cuda_keeps_released_memory_mapped_up_to_the_limit(monkeypatch, caplog, failing):
    """A driver that refuses costs speed, and is told."""
    from zmqengine.engine.host import device_memory

    driver = Driver(failing)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    for setter in ("set_memory_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, setter, lambda bytes_: bytes_)
    with caplog.at_level("INFO", "zmqengine.engine"):
        device_memory.limit_mlx(64 << 30, 1 << 30)
    assert driver.attributes == ([(1007, 4, 64 << 30)] if failing >= 2 else [])
    assert ("unmaps released memory" in caplog.text) == (failing < 3)


@pytest.mark.parametrize("limit", [100 << 20, 1 << 30, 16 << 30])
def test_windows_of_drafts_take_no_more_than_is_set_aside_for_such_things(monkeypatch, limit):
    """Where memory is small a window is of fewer tokens; a model that fitted without drafts fits with them."""
    monkeypatch.setattr(mx, "get_memory_limit", lambda: limit)
    speculator = open_speculator("auto", 150_000)
    assert speculator is not None
    assert 0 < speculator.workspace_bytes(32, 150_000) <= WORKSPACE_SHARE * limit


class Metal:
    """Stands in for mlx.core where there is no Metal: what it recommends and holds, and the calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit = 17
        self.calls: list[str | int] = []
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12_000})
        monkeypatch.setattr(mx, "get_memory_limit", lambda: 8_000)
        monkeypatch.setattr(mx, "get_active_memory", lambda: 6_000)
        monkeypatch.setattr(mx, "clear_cache", lambda: self.calls.append("clear"))
        monkeypatch.setattr(mx, "set_wired_limit", self.set)

    def set(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        self.calls.append(limit)
        return before


@pytest.mark.parametrize(
    ("asked", "calls", "told"),
    [
        ("weights", ["clear", 6_000, 17], "weights (0.00 GiB)"),
        ("all", [8_000, 17], "all (0.00 GiB)"),
        (5_000, [5_000, 17], "5000 (0.00 GiB)"),
        (50_000, [12_000, 17], "50000 (0.00 GiB)"),
        ("off", [], "off"),
        (0, [], "0"),
    ],
)
def test_memory_is_wired_as_asked_and_restored_once(monkeypatch, asked, calls, told):
    """mlx #3186: the weights alone by default, without what loading left; never more than Metal recommends."""
    metal = Metal(monkeypatch)
    wired = WiredMemory(asked)
    wired.restore()
    wired.restore()
    assert metal.calls == calls
    assert metal.limit == 17
    assert wired.description == told


@pytest.mark.parametrize(("asked", "bytes_"), [("weights", 6_000), ("all", 5_000), ("off", None)])
def test_memory_is_unwired_and_wired_again(monkeypatch, asked, bytes_):
    """Each once, however often it is said, at a limit that has fallen meanwhile."""
    metal = Metal(monkeypatch)
    wired = WiredMemory(asked)
    metal.calls.clear()
    wired.wire()
    wired.unwire()
    wired.unwire()
    wired.follow(5_000)
    assert metal.calls == ([] if bytes_ is None else [0])
    wired.wire()
    wired.wire()
    assert metal.calls == ([] if bytes_ is None else [0, "clear", bytes_])
    wired.unwire()
    wired.restore()
    wired.wire()
    assert metal.limit == 17


def test_an_engine_wires_what_is_in_use_when_its_weights_are_loaded(models, monkeypatch):
    """By default no room is left for later buffers; closing the engine puts the limit back."""
    metal = Metal(monkeypatch)
    engine = make_engine(models["llama"])
    assert metal.limit == 6_000
    engine.close()
    engine.close()
    assert metal.limit == 17
    assert [call for call in metal.calls if call != "clear"] == [6_000, 17]


def test_steps_change_nothing_of_what_is_wired(models, monkeypatch):
    """mlx #3186: each change of the residency set is a commit. Rows come, grow, leave and are cached meanwhile."""
    metal = Metal(monkeypatch)
    engine = make_engine(models["llama"])
    metal.calls.clear()
    for start in range(4):
        engine.insert([RowRequest(start * 2 + row, [start, row] * 40, max_tokens=30) for row in range(2)])
        for _ in range(12):
            engine.next()
    for _ in range(40):
        engine.next()
    assert engine.stats().generated_tokens == 8 * 30
    assert metal.calls == []
    engine.close()


@pytest.mark.parametrize("shape", ["llama", "hybrid"])
def test_a_step_takes_and_gives_back_no_large_buffer(models, shape):
    """Each would be a change of the residency set. Caches are written where they are, but where they grow."""
    engine = make_engine(models[shape])
    engine.insert(
        [RowRequest(row, [1 + (row * 31 + at * 7) % 300 for at in range(1100)], 200) for row in range(4)]
    )
    while engine.stats().rows_prefilling:
        engine.next()
    taken = []
    for _ in range(32):
        # Whole steps: the step in flight has ended before one is measured, and the measured one afterwards.
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.next()
        mx.synchronize()
        taken.append(mx.get_peak_memory() - before)
    # A quarter of the steps may make a block for the prefix cache, and one grows the caches. The keys of one of two
    # layers are a quarter of the KV cache, so a step that copied those of a layer would fail.
    assert sorted(taken)[24] < engine.memory().kv / 4
    engine.close()


@pytest.mark.parametrize(("asked", "wired"), [("all", [5_000]), ("weights", []), ("off", []), (5_500, [])])
def test_a_smaller_share_reaches_mlx(models, monkeypatch, asked, wired):
    """Another worker came: MLX's own limits fall too, and the wired one where all of the limit was to be wired."""
    metal, told = Metal(monkeypatch), dict[str, int]()
    monkeypatch.setattr(mx, "set_memory_limit", lambda size: told.update(memory=size))
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: told.update(cache=size))
    engine = make_engine(models["llama"], wired_limit=asked)
    metal.calls.clear()
    engine.limit_memory(5_000)
    assert told == {"memory": 5_000, "cache": 625}
    assert metal.calls == wired
    engine.close()
    engine.limit_memory(5_000)
    assert metal.limit == 17


def test_nothing_is_wired_without_metal(monkeypatch):
    """CUDA and the CPU have no such limit."""
    metal = Metal(monkeypatch)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert WiredMemory("all").description == ""
    assert metal.calls == []


def test_an_engine_that_cannot_be_built_leaves_no_limit_behind(models, monkeypatch):
    """The probe raises after memory was wired."""
    metal = Metal(monkeypatch)

    class Broken:
        layers = models["llama"].layers

        def __call__(self, inputs, cache=None):
            raise ValueError("shapes do not fit")

    with pytest.raises(ValueError, match="shapes"):
        make_engine(Broken())
    assert metal.limit == 17


@pytest.mark.parametrize(("speculate", "drafts"), [("auto", False), ("ngram", True), ("off", False)])
def test_speculation_is_off_by_default_where_it_was_not_measured(speculate, drafts):
    """As on Metal; who asks for a source gets it."""
    assert (open_speculator(speculate, 320, by_default=False) is not None) == drafts
