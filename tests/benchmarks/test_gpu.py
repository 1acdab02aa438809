"""`benchmarks.gpu` measures a worker: its figures are for a GPU, its requests are the same on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.bare_process import BareProcess
from zmqengine.bench.load.prompts import prompts_for, vocabulary_of_file
from zmqengine.bench.reports import machine
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.engine.fake.fake_tokenizer import fake_tokenizer_json
from zmqengine.testing import FakeWorker


def test_first_requests_are_told_apart_from_those_after_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One figure each for the first, the tenth, and after a short and a long rest; and the clock where there is one."""
    monkeypatch.setattr(gpu, "RESTS_S", (0.01, 0.01, 0.02))
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(fake_tokenizer_json(300))
    prompts = prompts_for(vocabulary_of_file(tokenizer), "0")
    with FakeWorker() as worker:
        target = TargetSpec(label="ours", kind="worker", address=worker.address)
        cell = asyncio.run(gpu.first_requests(target, prompts))
    assert not cell.error
    times = {name: value for name, value in cell.measures.items() if name.startswith("ttft_")}
    assert set(times) == {f"ttft_{name}_ms" for name in ("first", "tenth", "median", "rested", "idle")}
    assert all(value > 0 for value in times.values())


def test_the_clock_of_a_gpu_is_asked_for_and_need_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command prints; None without the command, or if it says something else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(machine.gpu_clock_mhz()) is None
    command = tmp_path / "nvidia-smi"
    for printed, expected in (("1980", 1980.0), ("[N/A]", None)):
        command.write_text(f"#!/bin/sh\necho '{printed}'\n")
        command.chmod(0o755)
        assert asyncio.run(machine.gpu_clock_mhz()) == expected


def test_a_generator_that_cannot_load_says_why(tmp_path: Path) -> None:
    """The last line of what it wrote, and not only that it is gone."""
    with pytest.raises(
        TargetError, match=r"cannot load .*: .*(No such file|not found|not a directory|config\.json)"
    ):
        asyncio.run(BareProcess.start(tmp_path))
