"""`zmqengine worker` and its options."""

from __future__ import annotations

import dataclasses
import runpy
import subprocess
import sys

import pytest

from zmqengine.cli.commands.worker import worker
from zmqengine.cli.main import main
from zmqengine.cli.quantities import byte_size, shown
from zmqengine.config import WorkerConfig
from zmqengine.worker.process.parent import EXIT_HOPELESS, EXIT_USAGE


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """The configurations that supervisors were started with; none really starts."""
    configs: list[WorkerConfig] = []

    def supervise(config: WorkerConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("zmqengine.worker.process.supervisor.supervise", supervise)
    return configs


def test_every_field_of_the_configuration_is_an_option() -> None:
    """None is forgotten, and each that people see is explained."""
    fields = {field.name for field in dataclasses.fields(WorkerConfig)}
    shown = {
        option.name
        for option in worker.params
        if getattr(option, "help", "") and not getattr(option, "hidden", False)
    }
    assert {option.name for option in worker.params} == fields - {
        "bind_cmd",
        "bind_out",
        "memory_total_bytes",
        "memory_least_bytes",
        "model_name",
    }
    assert {option.name for option in worker.params} - shown == {"engine", "fault_drop_frames"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rows-max 0", "--rows-max is 0: it must be from 1 to 4096"),
        ("--memory-limit 1K", "--memory-limit is 1024: it must be from 1048576 to"),
        ("--rows-max three", "'three' is not a valid integer"),
        ("--log-level loud", "'loud' is not one of 'debug', 'info', 'warning', 'error'"),
        ("--wired-limit some", "--wired-limit is 'some': it must be weights, off, all or a size such as 12G"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    arguments: str, said: str, supervised: list[WorkerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and no worker starts."""
    assert main(["worker", *arguments.split()]) == 2
    written = capsys.readouterr().err
    assert said in written
    assert written.count("\n") == 1
    assert supervised == []


def test_without_options_the_worker_is_the_default_one(supervised: list[WorkerConfig]) -> None:
    """The command line has no defaults of its own."""
    assert main(["worker"]) == 0
    assert supervised == [WorkerConfig()]


def test_options_arrive(supervised: list[WorkerConfig]) -> None:
    """Sizes, seconds, choices and flags."""
    arguments = "--name one --memory-limit 1.5G --prompt-cache-bytes 0 --pass-timeout 2.5 --log-format json"
    arguments += " --wired-limit 1G"
    rules = ["--share", "chat*=4", "--share", "*=0.5", "--priority-min", "nightly=1"]
    assert main(["worker", *arguments.split(), "--die-with-parent", *rules]) == 0
    assert supervised == [
        WorkerConfig(
            name="one",
            memory_limit_bytes=3 << 29,
            wired_limit=1 << 30,
            prompt_cache_bytes=0,
            pass_timeout_s=2.5,
            log_format="json",
            die_with_parent=True,
            share=("chat*=4", "*=0.5"),
            priority_min=("nightly=1",),
        )
    ]


def test_options_come_from_the_environment(
    supervised: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers and service files give them."""
    monkeypatch.setenv("ZMQENGINE_WORKER_QUEUE_MAX", "64")
    monkeypatch.setenv("ZMQENGINE_WORKER_MEMORY_LIMIT_BYTES", "2G")
    monkeypatch.setenv("ZMQENGINE_WORKER_SUPERVISE", "1")
    assert main(["worker"]) == 0
    assert supervised == [WorkerConfig(queue_max=64, memory_limit_bytes=2 << 30)]


def test_a_worker_that_cannot_start_is_failure_to_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is meant for service managers does not leak out of the supervisor."""
    monkeypatch.setattr("zmqengine.worker.process.supervisor.supervise", lambda config: EXIT_HOPELESS)
    assert main(["worker"]) == 1


@pytest.mark.parametrize("more", [[], ["--no-supervise"]])
def test_a_model_that_is_not_there_is_one_line_and_not_zero(more: list[str], short_directory: str) -> None:
    """smg #1427 review: construction failure ends start-up with a code that is not zero, and is never SERVING."""
    command = [
        sys.executable,
        "-m",
        "zmqengine.cli.main",
        "worker",
        "--model",
        "/nowhere/at/all",
        "--log-level",
        "error",
    ]
    run = subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == (EXIT_HOPELESS if more else 1), run.stderr
    assert "/nowhere/at/all" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert run.stdout == ""


def test_the_module_of_a_worker_refuses_options(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They would be ignored, and pico loaded instead of the model that was named."""
    monkeypatch.setattr(sys, "argv", ["zmqengine.worker", "--model", "other"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("zmqengine.worker", run_name="__main__")
    assert exit_.value.code == EXIT_USAGE
    assert "zmqengine worker" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("2g", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("64 KB", 64 << 10),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    """Units of 1024."""
    assert byte_size(text) == size


@pytest.mark.parametrize("size", [0, 1, 1023, 64 << 10, 16 << 20, 512 << 20, 3 << 29])
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    """The defaults in --help can be typed back."""
    assert byte_size(shown(size)) == size
