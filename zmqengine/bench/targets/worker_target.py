"""A zmqengine worker as a target, through the client library."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from zmqengine.bench.targets.records import Arrival, RequestRecord, RequestSpec
from zmqengine.bench.targets.sse import CountTokens
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.errors import ZmqEngineError
from zmqengine_client import AsyncClient
from zmqengine_client.core.connection import CONNECT_S

Clock = Callable[[], float]


class WorkerOutcome:
    """An answer of a worker, whose record is already complete."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def record(self, count_tokens: CountTokens | None = None) -> RequestRecord:
        return self._record


class WorkerStream:
    """A request in flight, read token by token."""

    def __init__(self, session: WorkerSession, request: RequestSpec) -> None:
        self._session = session
        self._started_s = session.clock()
        self._arrivals: list[Arrival] = []
        self._wanted = 0
        self._reached = asyncio.Event()
        self._cancelled = False
        self._stream = session.client.generate_tokens(
            request.prompt_ids,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            constraint=request.constraint,
            temperature=request.temperature,
            top_p=request.top_p,
        )
        self._task = asyncio.ensure_future(self._run())

    @property
    def chunks(self) -> int:
        """The number of received chunks of tokens."""
        return len(self._arrivals)

    async def wait_chunks(self, chunks: int) -> bool:
        """Wait for this number of chunks of tokens."""
        if self.chunks < chunks and not self._task.done():
            self._wanted = chunks
            self._reached.clear()
            await self._reached.wait()
        return self.chunks >= chunks

    def cancel(self) -> None:
        """Stop reading, which aborts the request."""
        if not self._task.done():
            self._cancelled = True
            self._task.cancel()

    async def outcome(self) -> WorkerOutcome:
        """Wait for the end."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not (self._cancelled and self._task.cancelled()):
                raise
            return self._left()

    def _left(self) -> WorkerOutcome:
        return WorkerOutcome(
            RequestRecord(
                started_s=self._started_s,
                ended_s=self._session.clock(),
                arrivals=self._arrivals,
                finish="abort",
                cancelled=True,
            )
        )

    async def _run(self) -> WorkerOutcome:
        error = ""
        try:
            await asyncio.wait_for(self._read(), self._session.timeout_s)
        except ZmqEngineError as failure:
            error = f"{failure.code}: {failure.message}"
        except asyncio.TimeoutError:
            error = f"no end within {self._session.timeout_s:g} s"
        finally:
            self._reached.set()
        ended_s = self._session.clock()
        completion = None if error else self._stream.result
        return WorkerOutcome(
            RequestRecord(
                started_s=self._started_s,
                ended_s=ended_s,
                arrivals=self._arrivals,
                prompt_tokens=completion.prompt_tokens if completion else 0,
                cached_tokens=completion.cached_tokens if completion else None,
                finish=completion.finish if completion else "",
                error=error,
                output_ids=list(completion.tokens) if completion else [],
            )
        )

    async def _read(self) -> None:
        clock, arrivals = self._session.clock, self._arrivals
        async with self._stream as stream:
            async for chunk in stream:
                arrivals.append(Arrival(clock(), len(chunk.tokens)))
                if self._wanted and len(arrivals) >= self._wanted:
                    self._wanted = 0
                    self._reached.set()


class WorkerSession:
    def __init__(self, client: AsyncClient, *, timeout_s: float, clock: Clock = time.perf_counter) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.clock = clock

    @classmethod
    async def open(cls, spec: TargetSpec, *, timeout_s: float) -> WorkerSession:
        """Open a session with a ready worker. Raises TargetError if it cannot be reached."""
        # It may be starting: without a time the client waits for no socket file.
        client = AsyncClient(spec.address, name="zmqengine bench", connect_timeout_s=CONNECT_S)
        try:
            await client.wait_ready()
        except ZmqEngineError as error:
            await client.close()
            raise TargetError(f"{spec.label}: {error}") from error
        return cls(client, timeout_s=timeout_s)

    def send(self, request: RequestSpec) -> WorkerStream:
        """Insert a request."""
        if not request.prompt_ids:
            raise TargetError("a worker takes token ids, and no tokenizer is known")
        return WorkerStream(self, request)

    async def close(self) -> None:
        """Close the client, which aborts running requests."""
        await self.client.close()
