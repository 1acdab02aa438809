"""The bare generator in a child process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from zmqengine.bench.bare import BareJob, BareResult
from zmqengine.bench.servers import ONE_THREAD
from zmqengine.bench.targets import TargetError


class BareProcess:
    """mlx-lm's generator, loaded and waiting for jobs."""

    def __init__(self, process: asyncio.subprocess.Process, blas: str) -> None:
        self.pid = process.pid
        self.blas = blas
        self._process = process

    @classmethod
    async def start(cls, model: Path, rows: int = 0) -> BareProcess:
        """Load the model in a child, for so many rows at a time; 0 is the generator's own default.

        Raises TargetError if that fails.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "zmqengine.bench.bare",
            str(model),
            str(rows),
            env={**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 26,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            raise TargetError(f"the bare generator cannot load {model}")
        return cls(process, line.decode().strip())

    async def run(self, job: BareJob) -> BareResult:
        """Run one job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise TargetError("the bare generator died")
        return msgspec.json.decode(line, type=BareResult)

    async def end(self) -> None:
        """End the child."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
