"""The bare generator in a child process."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from zmqengine.bench.servers.bare_generator import BareJob, BareResult
from zmqengine.bench.servers.started import ONE_THREAD
from zmqengine.bench.targets.target import TargetError
from zmqengine.python_child import python_command, python_environment


class BareProcess:
    """A child with mlx-lm's generator, loaded and waiting for jobs."""

    def __init__(self, process: asyncio.subprocess.Process, blas: str, errors: IO[bytes]) -> None:
        self.pid = process.pid
        self.blas = blas
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, model: Path, rows: int = 0) -> BareProcess:
        """Load the model in a child, for `rows` at a time; 0 is the generator's default.

        Raises TargetError if that fails.
        """
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - until the child has ended
        process = await asyncio.create_subprocess_exec(
            *python_command("zmqengine.bench.servers.bare_generator", str(model), str(rows)),
            # MLX for CUDA ends a process after many graph cache misses, whatever its speed.
            env={
                "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
                **python_environment(ONE_THREAD),
                "HF_HUB_OFFLINE": "1",
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=1 << 26,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            raise TargetError(f"the bare generator cannot load {model}: {_last_line(errors)}")
        return cls(process, line.decode().strip(), errors)

    async def run(self, job: BareJob) -> BareResult:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise TargetError(f"the bare generator died: {_last_line(self._errors)}")
        return msgspec.json.decode(line, type=BareResult)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._errors.close()


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
