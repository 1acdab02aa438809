"""The asynchronous client: sockets on the event loop, streams for `async for`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from zmqengine.errors import WorkerLost, ZmqEngineError
from zmqengine.protocol.addresses import resolve
from zmqengine.protocol.messages import (
    ControlReply,
    ControlRequest,
    Describe,
    Description,
    Drain,
    EndRequest,
    GetMetrics,
    GetStatus,
    GetTokenizer,
    Metrics,
    Ping,
    Status,
    TokenizerBundle,
)
from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.mailbox import AsyncInbox, AsyncMailbox
from zmqengine_client.aio.streams import AsyncStream, AsyncTextStream, AsyncTokenStream
from zmqengine_client.core.control import ControlCall
from zmqengine_client.core.events import ClientEvent, Counters
from zmqengine_client.core.options import Options
from zmqengine_client.core.request import Request
from zmqengine_client.core.session import Session
from zmqengine_client.core.session_config import SessionConfig
from zmqengine_client.keys import CurveKeys, keys_from_environment
from zmqengine_client.text import tokenizer_shelf
from zmqengine_client.text.new_request import (
    Encode,
    chat_encoder,
    new_request,
    new_text_reader,
    prompt_encoder,
    refuse,
    set_text_prompt,
    set_token_prompt,
)
from zmqengine_client.text.readers import TextReader, TokenReader
from zmqengine_client.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("zmqengine.client")

ChunkT = TypeVar("ChunkT")
ReplyT = TypeVar("ReplyT", bound=ControlReply)


class AsyncClient:
    """A connection to one worker for the tasks of one event loop: `Client` with `await` and `async for`.

    `address` is a name, an ipc:// or a tcp:// address; None is `$ZMQENGINE_ADDRESS` or `default`. Making a client
    neither waits nor fails when no worker is there: the first call does, after `connect_timeout_s` with
    `WorkerLost`.

    Tokens are neither lost nor repeated. When the worker dies, streams wait up to `worker_lost_timeout_s` for the next
    one and go on there; with `resume=False` they end with `WorkerLost`. `on_event` is called on the event loop.
    Prompts are tokenised in a thread, off the loop. A client does not survive a fork: make a new one in the child.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "zmqengine-client",
        keys: CurveKeys | None = None,
        session_secret: bytes | None = None,
        connect_timeout_s: float = 10.0,
        ready_timeout_s: float | None = 600.0,
        answer_timeout_s: float = 10.0,
        worker_lost_timeout_s: float = 60.0,
        resume: bool = True,
        on_event: Callable[[ClientEvent], None] | None = None,
    ) -> None:
        config = SessionConfig(
            address=resolve(address),
            name=name[:128],
            session_secret=session_secret or secrets.token_bytes(32),
            connect_timeout_s=connect_timeout_s,
            ready_timeout_s=ready_timeout_s,
            answer_timeout_s=answer_timeout_s,
            worker_lost_timeout_s=worker_lost_timeout_s,
            resume=resume,
        )
        self._session = Session(config)
        self._keys = keys or keys_from_environment()
        self._on_event = on_event
        # Opened by the first call, on the loop that it runs on.
        self._driver: LoopDriver | None = None
        self._closed = False
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = asyncio.Lock()
        self._preparing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what runs, say bye, close the sockets. Idempotent; takes at most two seconds."""
        self._closed = True
        for task in self._preparing:
            task.cancel()
        if self._driver is not None:
            await self._driver.close()

    # --- the worker ----------------------------------------------------------------------------------------

    async def describe(self) -> Description:
        """Which worker this is, its model and limits, and whether it is ready."""
        return await self._ask(Describe, Description)

    async def status(self) -> Status:
        """Numbers for operators."""
        return await self._ask(GetStatus, Status)

    async def metrics(self) -> str:
        """The numbers for a Prometheus scraper, as text."""
        return (await self._ask(GetMetrics, Metrics)).text

    async def drain(self) -> None:
        """Have the worker finish what runs and exit. Raises `NotAuthorized` without an operator's key."""
        await self._control(Drain)

    async def end_request(self, session: str, request: str) -> None:
        """End a request of any session, as `status` names them, if it has not ended. Raises `NotAuthorized` without an
        operator's key.
        """
        await self._control(lambda call: EndRequest(call, session, request))

    async def ping(self) -> float:
        """Seconds to the worker's control thread and back."""
        started = time.perf_counter()
        await self._control(Ping)
        return time.perf_counter() - started

    async def wait_ready(self, timeout_s: float | None = None) -> Description:
        """Wait until the worker takes requests; None is `connect_timeout_s` for a sign of life, then `ready_timeout_s`.

        Raises `WorkerLost`, `NotReady`, `ModelLoadError` or `Draining`.
        """
        reply = await self._control(None, timeout_s)
        assert isinstance(reply, Description)
        return reply

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: from this process, from disk, or fetched from the worker."""
        async with self._tokenizer_lock:
            model = self._session.connection.model
            known = self._tokenizer
            if known is not None and (model is None or model.tokenizer_hash == known.hash):
                return known
            described = (await self.wait_ready()).model
            found = None
            if described is not None:
                found = await asyncio.to_thread(tokenizer_shelf.find, described.tokenizer_hash)
            if found is None:
                bundle = await self._ask(GetTokenizer, TokenizerBundle)
                found = await asyncio.to_thread(tokenizer_shelf.add, bundle)
            self._tokenizer = found
            return found

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        return msgspec.structs.replace(self._session.outbox.counters)

    # --- generating ----------------------------------------------------------------------------------------

    def generate_tokens(self, prompt: Sequence[int], **options: Unpack[Options]) -> AsyncTokenStream:
        """Token ids in, token ids out. Returns at once; a refusal is raised when the stream is read."""
        self.check()
        request = new_request(options)
        set_token_prompt(request, prompt)
        request.listener = inbox = AsyncInbox()
        self._start(request)
        return AsyncTokenStream(TokenReader(request), inbox, self)

    def generate(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> AsyncTextStream:
        """Text that continues `prompt`, up to a stop string. Returns at once; the prompt is tokenised in a thread."""
        return self._generate_text(prompt_encoder(prompt), stop, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> AsyncTextStream:
        """The model's answer to a conversation, laid out by its chat template."""
        return self._generate_text(chat_encoder(messages, tools, chat_template_kwargs), stop, options)

    async def select(
        self, streams: Iterable[AsyncStream[ChunkT]]
    ) -> AsyncIterator[tuple[AsyncStream[ChunkT], ChunkT | None]]:
        """Chunks of many streams in one task, as they come: `(stream, chunk)`, and `(stream, None)` at its end.

        Raises nothing of the streams: look at `stream.result`. Leaving the loop early aborts none of them.
        """
        mailbox = AsyncMailbox()
        running = {stream._inbox: stream for stream in streams}
        for inbox in running:
            inbox.mailbox = mailbox
        ready = list(running)
        try:
            while running:
                for inbox in ready:
                    stream = running.get(inbox)
                    if stream is None:
                        continue
                    chunk = stream._take()
                    if chunk is not None:
                        yield stream, chunk
                    if stream.ended:
                        del running[inbox]
                        yield stream, None
                if running:
                    self.check()
                    ready = await mailbox.wait()
        finally:
            for inbox in running:
                inbox.mailbox = AsyncMailbox()

    # --- for streams ---------------------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        """Used by streams; call `stream.abort()`."""
        if self._driver is not None:
            self._driver.run(lambda now: self._session.abort_request(request, now))

    def check(self) -> None:
        """Raise RuntimeError if the client is closed or belongs to another process."""
        self._open().check()

    def _open(self) -> LoopDriver:
        if self._driver is None:
            if self._closed:
                raise RuntimeError("the client is closed")
            self._driver = LoopDriver(self._session, self._keys, self._on_event)
        return self._driver

    def _generate_text(self, encode: Encode, stop: str | Sequence[str], options: Options) -> AsyncTextStream:
        self.check()
        request = new_request(options)
        reader = new_text_reader(request, stop)
        request.listener = inbox = AsyncInbox()
        if not request.ended:
            task = asyncio.ensure_future(self._prepare(request, reader, encode, inbox))
            # The loop keeps only weak references to tasks.
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        return AsyncTextStream(reader, inbox, self)

    async def _prepare(self, request: Request, reader: TextReader, encode: Encode, inbox: AsyncInbox) -> None:
        try:
            tokenizer = await self.tokenizer()
            await asyncio.to_thread(set_text_prompt, request, reader, tokenizer, encode)
            if not request.ended:
                self._start(request)
        except ZmqEngineError as error:
            refuse(request, error)
        except asyncio.CancelledError:
            refuse(request, WorkerLost("the client was closed"))
            raise
        except Exception as error:
            log.exception("request %s: the prompt cannot be prepared", request.id)
            refuse(request, ZmqEngineError(f"the prompt cannot be prepared: {error}"))
        finally:
            inbox.notify()

    def _start(self, request: Request) -> None:
        self._open().run(lambda now: self._session.start_request(request, now))

    async def _ask(self, make: Callable[[int], ControlRequest], kind: type[ReplyT]) -> ReplyT:
        reply = await self._control(make)
        if not isinstance(reply, kind):
            raise ZmqEngineError(f"the worker answered with {type(reply).__name__}, not {kind.__name__}")
        return reply

    async def _control(
        self, make: Callable[[int], ControlRequest] | None, timeout_s: float | None = None
    ) -> ControlReply:
        self.check()
        inbox = AsyncInbox()
        call = ControlCall(make, inbox, timeout_s)
        self._open().run(lambda now: self._session.start_control(call, now))
        while not call.done:
            await inbox.mailbox.wait()
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result
