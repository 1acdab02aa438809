"""What is chosen for a device changes how fast a model computes, and not what."""

from __future__ import annotations

import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import make_engine
from zmqengine.engine import open as open_module
from zmqengine.engine.autotune import variants
from zmqengine.engine.host import environment
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.sampling import draw


def test_a_wrong_variant_is_not_taken_and_neither_is_one_that_raises():
    """However fast it is."""

    def slow() -> mx.array:
        time.sleep(0.002)
        return mx.ones((4,))

    def broken() -> mx.array:
        raise ValueError("not here")

    bad = {"wrong": lambda: mx.zeros((4,)), "nan": lambda: mx.ones((4,)) * mx.nan, "raises": broken}
    found = variants.fastest({"slow": slow, **bad})
    assert found.best == "slow"
    assert set(found.microseconds) == {"slow"}
    assert variants.fastest({"slow": slow, "fast": lambda: mx.ones((4,))}).best == "fast"


@pytest.mark.parametrize("method", ["search", "sort"])
def test_top_p_keeps_the_same_words_by_any_method(method):
    """The smallest set with so much weight, in a row whose logits lie far apart and in one of equals."""
    logits = mx.array([[3.0, 1.0, 2.0, -4.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 0.0, 0.0]])
    scaled = logits - logits.max(axis=-1, keepdims=True)
    floor = {"search": draw._nucleus_floor, "sort": draw._nucleus_floor_sorted}[method]
    kept = scaled >= floor(scaled, mx.exp(scaled), mx.array([[0.8], [0.5], [0.9]]))
    assert np.array(kept)[0].tolist() == [True, False, True, False, False]
    assert np.array(kept)[1].all()
    assert np.array(kept)[2].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("chip", "is_older"),
    [
        ("Apple M1", True),
        ("Apple M3 Ultra", True),
        ("Apple M4 Max", True),
        ("Apple M5 Max", False),
        ("Apple M6", False),
        ("Apple M10 Pro", False),
        ("Apple A19 Pro", False),
        ("", False),
    ],
)
def test_only_chips_that_are_known_to_be_older_get_longer_buffers(chip, is_older):
    """Measured on M1 to M4; a chip that comes is not one of them. 200 to 400 operations, for the watchdog's 5 s."""
    found = {one.name: one.value for one in environment._metal(chip)}
    assert ("MLX_MAX_OPS_PER_BUFFER" in found) == is_older
    assert 200 <= int(found.get("MLX_MAX_OPS_PER_BUFFER", 200)) <= 400


def test_macos_is_asked_for_the_chip(monkeypatch):
    """By its sysctl; one that fails is a newer chip."""
    asked = []

    def run(command, **_):
        asked.append(command)
        if not asked[1:]:
            return subprocess.CompletedProcess(command, 0, "Apple M3 Ultra\n", "")
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    names = [[one.name for one in environment.settings()] for _ in range(2)]
    assert asked[0] == ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    assert [("MLX_MAX_OPS_PER_BUFFER" in found) for found in names] == [True, False]


def test_variables_of_the_user_stand():
    """What suits a machine is set, unless it was set before; each has a reason and a source."""
    wanted = [
        *environment._metal("Apple M3 Ultra"),
        *environment._cuda(),
    ]
    names = {one.name for one in wanted}
    assert {"MLX_MAX_OPS_PER_BUFFER", "MLX_USE_CUDA_GRAPHS", "MLX_ENABLE_TF32"} <= names
    assert all(one.why and one.source for one in wanted)
    assert "MLX_METAL_FAST_SYNCH" not in names
    stands = environment.variables_in(wanted[1:2], {"MLX_MAX_OPS_PER_BUFFER": "7"})
    assert (stands[0].value, stands[0].by) == ("7", "you")


def test_an_engine_reads_in_shorter_chunks_beside_rows_of_another_process(model):
    """By the count of tokens of its first chunk, at the same measured speed; its own rows have the same effect."""
    chunks = []
    for elsewhere in (0, 8):
        engine = make_engine(model)
        engine._pace.begin((20_000.0, 0.004))
        engine.share_device(elsewhere)
        engine.insert([RowRequest(0, [1 + place * 7 % 300 for place in range(1500)], 1)])
        chunks.append(engine.next().prefills[-1].done)
        engine.close()
    # A chunk as beside own rows, or all of the prompt.
    assert chunks == [1500, engine._pace.tokens_max]


@pytest.mark.parametrize("rests", [True, False])
def test_only_a_device_that_lowers_its_clock_is_kept_warm(model, monkeypatch, rests):
    """By a product that is computed, and never beside one that stays fast."""
    computed: list[mx.array] = []
    engine = make_engine(model, device=Device(rests=rests))
    monkeypatch.setattr(mx, "eval", lambda *arrays: computed.extend(arrays))
    assert engine.keep_warm() is rests
    assert len(computed) == rests


@pytest.mark.parametrize(
    ("cuda", "gpu", "device"),
    [
        (True, True, Device(is_gpu=True, keeps_buffers=True)),
        (False, True, Device(is_gpu=True, rests=True, drafts_by_default=False)),
        (False, False, Device()),
    ],
)
def test_a_device_has_the_traits_of_its_back_end(monkeypatch, cuda, gpu, device):
    """Metal alone rests, and drafts only when asked: it has not been measured there."""
    monkeypatch.setattr(open_module, "on_cuda", lambda: cuda)
    monkeypatch.setattr(open_module, "on_gpu", lambda: gpu)
    assert open_module.find_device() == device
