"""A load process: `python -m zmqengine.bench.load.load_process RESULT`, driven over its standard streams.

In: a line with a LoadJob, later any line to start. Out: a line once the session is open, and one when the file RESULT
has a LoadResult. So the processes of one measurement start together, however long their start-up takes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from zmqengine.bench.load.loops import closed_loop
from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.target import TargetOutcome, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session

try:
    # Reads HTTP streams in a third less time, which would otherwise count as the server's.
    from uvloop import run
except ImportError:
    from asyncio import run  # type: ignore[assignment]

READY = b"ready\n"
DONE = b"done\n"


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the process, and its CPU time during the work."""

    records: list[RequestRecord]
    cpu_s: float


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop of `users` over `requests`."""

    target: TargetSpec
    requests: list[RequestSpec]
    users: int
    timeout_s: float


async def run_job(job: LoadJob) -> tuple[list[TargetOutcome], float]:
    """Open a session, report it, wait for the start line, and run. Returns outcomes and CPU time."""
    session = await open_session(job.target, timeout_s=job.timeout_s, streams=job.users)
    try:
        _say(READY)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        before_s = time.process_time()
        outcomes = await closed_loop(session, job.requests, job.users)
        return outcomes, time.process_time() - before_s
    finally:
        await session.close()


def main() -> None:
    """Run one job."""
    job = msgspec.json.decode(sys.stdin.readline(), type=LoadJob)
    outcomes, cpu_s = run(run_job(job))
    result = LoadResult(records=[outcome.record() for outcome in outcomes], cpu_s=cpu_s)
    # Not through the pipe: asyncio lost the end of long lines after the process had exited (Python 3.11.7).
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(result))
    _say(DONE)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
