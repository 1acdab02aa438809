"""The synchronous client: an I/O thread in the background, streams to iterate over."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from zmqengine.errors import ZmqEngineError
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
from zmqengine_client.core.control import ControlCall
from zmqengine_client.core.events import ClientEvent, Counters
from zmqengine_client.core.options import Options
from zmqengine_client.core.request import Request
from zmqengine_client.core.session import Session
from zmqengine_client.core.session_config import SessionConfig
from zmqengine_client.keys import CurveKeys, keys_from_environment
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.mailbox import Inbox, Mailbox
from zmqengine_client.sync.streams import Stream, TextStream, TokenStream
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
from zmqengine_client.text.readers import TokenReader
from zmqengine_client.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

ChunkT = TypeVar("ChunkT")
ReplyT = TypeVar("ReplyT", bound=ControlReply)


class Client:
    """A connection to one worker, safe to use from many threads.

    `address` is a name, an ipc:// or a tcp:// address; None is `$ZMQENGINE_ADDRESS` or `default`. Making a client
    neither waits nor fails when no worker is there: the first call does, after `connect_timeout_s` with
    `WorkerLost`.

    Tokens are neither lost nor repeated. When the worker dies, streams wait up to `worker_lost_timeout_s` for the next
    one and go on there; with `resume=False` they end with `WorkerLost`. `on_event` is called on the I/O thread.
    A client does not survive a fork: make a new one in the child.
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
        self._io = IoThread(Session(config), keys or keys_from_environment(), on_event)
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        # Not a __del__: this also says bye when the interpreter ends.
        self._finalizer = weakref.finalize(self, self._io.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs, say bye, close the sockets. Idempotent; takes at most two seconds."""
        self._finalizer()

    # --- the worker ----------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Which worker this is, its model and limits, and whether it is ready."""
        return self._ask(Describe, Description)

    def status(self) -> Status:
        """Numbers for operators."""
        return self._ask(GetStatus, Status)

    def metrics(self) -> str:
        """The numbers for a Prometheus scraper, as text."""
        return self._ask(GetMetrics, Metrics).text

    def drain(self) -> None:
        """Have the worker finish what runs and exit. Raises `NotAuthorized` without an operator's key."""
        self._control(Drain)

    def end_request(self, session: str, request: str) -> None:
        """End a request of any session, as `status` names them, if it has not ended. Raises `NotAuthorized` without an
        operator's key.
        """
        self._control(lambda call: EndRequest(call, session, request))

    def ping(self) -> float:
        """Seconds to the worker's control thread and back."""
        started = time.perf_counter()
        self._control(Ping)
        return time.perf_counter() - started

    def wait_ready(self, timeout_s: float | None = None) -> Description:
        """Wait until the worker takes requests; None is `connect_timeout_s` for a sign of life, then `ready_timeout_s`.

        Raises `WorkerLost`, `NotReady`, `ModelLoadError` or `Draining`.
        """
        reply = self._control(None, timeout_s)
        assert isinstance(reply, Description)
        return reply

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: from this process, from disk, or fetched from the worker."""
        with self._tokenizer_lock:
            model = self._io.session.connection.model
            known = self._tokenizer
            if known is not None and (model is None or model.tokenizer_hash == known.hash):
                return known
            described = self.wait_ready().model
            found = tokenizer_shelf.find(described.tokenizer_hash) if described is not None else None
            self._tokenizer = found or tokenizer_shelf.add(self._ask(GetTokenizer, TokenizerBundle))
            return self._tokenizer

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        return msgspec.structs.replace(self._io.session.outbox.counters)

    # --- generating ----------------------------------------------------------------------------------------

    def generate_tokens(self, prompt: Sequence[int], **options: Unpack[Options]) -> TokenStream:
        """Token ids in, token ids out. Returns at once; a refusal is raised when the stream is read."""
        request = new_request(options)
        set_token_prompt(request, prompt)
        inbox = self._start(request)
        return TokenStream(TokenReader(request), inbox, self)

    def generate(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> TextStream:
        """Text that continues `prompt`, up to a stop string. The prompt is tokenised on this thread."""
        return self._generate_text(prompt_encoder(prompt), stop, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> TextStream:
        """The model's answer to a conversation, laid out by its chat template."""
        return self._generate_text(chat_encoder(messages, tools, chat_template_kwargs), stop, options)

    def select(self, streams: Iterable[Stream[ChunkT]]) -> Iterator[tuple[Stream[ChunkT], ChunkT | None]]:
        """Chunks of many streams on one thread, as they come: `(stream, chunk)`, and `(stream, None)` at its end.

        Raises nothing of the streams: look at `stream.result`. Leaving the loop early aborts none of them.
        """
        mailbox = Mailbox()
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
                    ready = mailbox.wait()
        finally:
            for inbox in running:
                inbox.mailbox = Mailbox()

    # --- for streams ---------------------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        """Used by streams; call `stream.abort()`."""
        self._io.post(lambda now: self._io.session.abort_request(request, now))

    def check(self) -> None:
        """Raise RuntimeError if waiting is no use: the client is closed, forked, or this is its own I/O thread."""
        self._io.check_waiting()

    def _generate_text(self, encode: Encode, stop: str | Sequence[str], options: Options) -> TextStream:
        request = new_request(options)
        reader = new_text_reader(request, stop)
        if not request.ended:
            try:
                set_text_prompt(request, reader, self.tokenizer(), encode)
            except ZmqEngineError as error:
                refuse(request, error)
        inbox = self._start(request)
        return TextStream(reader, inbox, self)

    def _start(self, request: Request) -> Inbox:
        self._io.check()
        inbox = Inbox()
        request.listener = inbox
        if not request.ended:
            self._io.post(lambda now: self._io.session.start_request(request, now))
        return inbox

    def _ask(self, make: Callable[[int], ControlRequest], kind: type[ReplyT]) -> ReplyT:
        reply = self._control(make)
        if not isinstance(reply, kind):
            raise ZmqEngineError(f"the worker answered with {type(reply).__name__}, not {kind.__name__}")
        return reply

    def _control(
        self, make: Callable[[int], ControlRequest] | None, timeout_s: float | None = None
    ) -> ControlReply:
        self.check()
        inbox = Inbox()
        call = ControlCall(make, inbox, timeout_s)
        self._io.post(lambda now: self._io.session.start_control(call, now))
        while not call.done:
            inbox.mailbox.wait()
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result
