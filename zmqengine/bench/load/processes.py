"""Load from several processes at once, some of which may be suspended for a while."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from zmqengine.bench.load.load_process import DONE, READY, LoadJob, LoadResult
from zmqengine.bench.targets.target import TargetError
from zmqengine.python_child import python_command, python_environment

START_TIMEOUT_S = 120.0


class LoadProcess:
    """One child that runs one job."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self._directory = TemporaryDirectory(prefix="zmqengine-load-")
        self._result = Path(self._directory.name) / "result.json"

    async def start(self) -> None:
        """Start the child and wait until its session is open. Raises TargetError if that fails."""
        self._process = await asyncio.create_subprocess_exec(
            *python_command("zmqengine.bench.load.load_process", str(self._result)),
            env=python_environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._tell(msgspec.json.encode(self._job) + b"\n")
        line = await asyncio.wait_for(self._line(), START_TIMEOUT_S)
        if line != READY:
            raise TargetError(f"{self._job.target.label}: a load process could not start")

    async def run(self) -> LoadResult:
        """Start the work and wait for its result."""
        self._tell(b"go\n")
        if await self._line() != DONE:
            raise TargetError(f"{self._job.target.label}: a load process died")
        return msgspec.json.decode(self._result.read_bytes(), type=LoadResult)

    def pause(self) -> None:
        """Suspend the process, as a debugger or a closed laptop lid does."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def end(self) -> None:
        """Kill the child."""
        if self._process is not None:
            if self._process.returncode is None:
                self.resume()
                self._process.kill()
            await self._process.wait()
        self._directory.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _tell(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


async def run_together(
    jobs: Sequence[LoadJob], *, slow: Sequence[int] = (), stalled: Sequence[int] = (), stall_s: float = 0.0
) -> list[LoadResult]:
    """The result of each job. Each runs in its own process, and all start together.

    Processes numbered in `slow` run one fifth of the time; those in `stalled` are suspended once, for `stall_s`,
    soon after the start.
    """
    processes = [LoadProcess(job) for job in jobs]
    try:
        await asyncio.gather(*(process.start() for process in processes))
        runs = [asyncio.ensure_future(process.run()) for process in processes]
        hindrances = [_slow_down(processes[number], runs[number]) for number in slow]
        hindrances += [_stall(processes[number], stall_s) for number in stalled]
        results, _ = await asyncio.gather(asyncio.gather(*runs), asyncio.gather(*hindrances))
        return list(results)
    finally:
        await asyncio.gather(*(process.end() for process in processes))


async def _slow_down(process: LoadProcess, run: asyncio.Future[LoadResult]) -> None:
    while not run.done():
        process.pause()
        await asyncio.sleep(0.2)
        process.resume()
        await asyncio.sleep(0.05)


async def _stall(process: LoadProcess, stall_s: float) -> None:
    await asyncio.sleep(0.1)
    process.pause()
    await asyncio.sleep(stall_s)
    process.resume()
