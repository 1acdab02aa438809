"""Real launchers for tests: `zmqengine serve` in a process, workers on the fake engine, sockets of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.workers import START_S, wait_in_loop
from zmqengine.protocol.launcher import DIRECTORY, ModelEntry
from zmqengine_client.launcher import AsyncLauncher

GIB = 1 << 30


def fake(gib: float = 1.0, **config: Any) -> dict[str, str]:
    """Options of a model on the fake engine that needs about this much."""
    config = {"parameter_bytes": int(gib * GIB), "kv_bytes_token": 0, **config}
    return {"engine": "fake:" + json.dumps(config)}


def toml(models: Mapping[str, Mapping[str, Any]], **top: Any) -> str:
    """A file of models. Of each model the keys of its entry; `engine` is put among its options."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    for name, given in models.items():
        entry = dict(given)
        options = {key: entry.pop(key) for key in list(entry) if key in ("engine", "restarts-max")}
        options |= entry.pop("options", {})
        lines += ["", "[[model]]", f"name = {json.dumps(name)}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
        lines += ["[model.options]"] + [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    return "\n".join(lines) + "\n"


class LauncherProcess:
    """`zmqengine serve` in a process of its own, and every process that it starts. Use it as a context manager."""

    def __init__(self, models: str, *arguments: str, http: bool = False, **environment: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="zs-"))
        self.file = self.directory / "models.toml"
        self.file.write_text(models)
        self.address = f"ipc://{self.directory}/d/{DIRECTORY}/ctl"
        self.root = self.directory / "d" / DIRECTORY
        self._arguments = [*arguments, *([] if http else ["--no-http"])]
        self.environment = os.environ | {
            "ZMQENGINE_DIR": str(self.directory / "d"),
            "ZMQENGINE_CACHE_DIR": str(self.directory / "cache"),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "OPENBLAS_NUM_THREADS": "1",
            "ZMQENGINE_HTTP_PROBE_MS": "100",
            **environment,
        }
        self._log = (self.directory / "log").open("ab")
        self.process = self._start()

    def __enter__(self) -> LauncherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # The launcher first: it may be starting a worker that a look at all processes would miss.
        self.kill()
        while processes := self.all_processes():
            for process in processes:
                with_suppress(process.kill)
            psutil.wait_procs(processes, START_S)
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def log(self) -> str:
        """What the launcher has said."""
        return (self.directory / "log").read_text(errors="replace")

    def client(self) -> AsyncLauncher:
        """A connection that gives up only where a test would hang."""
        return AsyncLauncher(self.address, answer_timeout_s=START_S)

    def kill(self) -> None:
        """SIGKILL the launcher alone."""
        self.process.kill()
        self.process.wait(START_S)

    def start_again(self) -> None:
        """The next launcher, with the same list."""
        assert self.process.poll() is not None
        self.process = self._start()

    def replace_argument(self, old: str, new: str) -> None:
        """For the next launcher."""
        self._arguments[self._arguments.index(old)] = new

    def terminate(self) -> int:
        """SIGTERM the launcher; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def all_processes(self) -> list[psutil.Process]:
        """The launcher and every process with its directory in the environment."""
        mark = str(self.directory)
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ZMQENGINE_DIR", "").startswith(mark):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def command(self, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        """Another command of the same user."""
        return subprocess.run(
            [sys.executable, "-m", "zmqengine.cli.main", *arguments],
            env=self.environment, input=typed, capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "zmqengine.cli.main", "serve", str(self.file), *self._arguments],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip


async def entry_of(launcher: AsyncLauncher, name: str) -> ModelEntry:
    """The entry of one model."""
    return next(entry for entry in (await launcher.models()).models if entry.name == name)


async def wait_for(
    launcher: AsyncLauncher, name: str, done: Callable[[ModelEntry], object], otherwise: str
) -> ModelEntry:
    """Until the entry of a model is as `done` wants it."""
    entries = [await entry_of(launcher, name)]

    async def look() -> None:
        entries.append(await entry_of(launcher, name))

    import asyncio

    deadline = asyncio.get_running_loop().time() + START_S
    while not done(entries[-1]):
        assert asyncio.get_running_loop().time() < deadline, f"{otherwise}: {entries[-1]}"
        await asyncio.sleep(0.02)
        await look()
    return entries[-1]


def with_suppress(act: Callable[[], object]) -> None:
    """Signal a process that may be gone."""
    try:
        act()
    except psutil.Error:
        return


__all__ = ["GIB", "LauncherProcess", "entry_of", "fake", "toml", "wait_for", "wait_in_loop"]
