# Made from ../aio/client.py by `python -m tools`: change that one.
"""The synchronous client: an I/O thread in the background, streams to iterate over."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import msgspec

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.addresses import resolve
from zmqengine.protocol.launcher import launcher_at, stand_in
from zmqengine.protocol.messages import (
    ControlRequest,
    Describe,
    Description,
    Drain,
    EndRequest,
    GetMetrics,
    GetStatus,
    LoadAdapter,
    Metrics,
    Ping,
    Status,
    UnloadAdapter,
)
from zmqengine_client.core.chunks import TextChunk, TokenChunk
from zmqengine_client.core.connection import SessionConfig
from zmqengine_client.core.embedding import Embedded, EmbedOptions, Ranked
from zmqengine_client.core.options import Options, check_names
from zmqengine_client.core.outbox import ClientCounters, ClientEvent
from zmqengine_client.core.request import Request, TokenReader, new_request, set_token_prompt
from zmqengine_client.core.session import ClientSession
from zmqengine_client.images.prompt_image import PromptImage
from zmqengine_client.images.sources import ImageLike
from zmqengine_client.keys import CurveKeys, keys_from_environment
from zmqengine_client.sync.deciding import Deciding
from zmqengine_client.sync.embedding import Embedding
from zmqengine_client.sync.group import Group
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.model_tokenizer import ModelTokenizer
from zmqengine_client.sync.preparation import Preparation
from zmqengine_client.sync.questions import Questions, ReplyT
from zmqengine_client.sync.reranking import Reranking
from zmqengine_client.sync.streams import Stream, TextStream, TokenStream
from zmqengine_client.sync.waiting import Notifier
from zmqengine_client.text.decisions import DecideOptions, Decisions, Question, questions_of
from zmqengine_client.text.prompts import Encode, chat_encoder, new_text_reader, prompt_encoder
from zmqengine_client.text.reranking import Reranked
from zmqengine_client.text.text_source import Text, source_of
from zmqengine_client.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack


class Client:
    """A connection to one worker, safe to use from many threads.

    `address` is a name, an ipc:// or a tcp:// address; None is `$ZMQENGINE_ADDRESS`, or `default`, or where no such
    worker runs the only model that `zmqengine serve` has loaded. Making a client neither waits nor fails when no worker
    is there: the first call does with `WorkerLost`, after `connect_timeout_s`. None of it is 10 s, or no wait at all
    where the socket file is absent: give a time to wait for a worker that is about to start.

    With `model` the address is that of a launcher, None the one of this user (`zmqengine serve`). It loads the model
    when the client has something to do, for up to `ready_timeout_s`; events of the kind `loading` tell how far it is.
    While the client does nothing, the model may give way to another one.

    Tokens are neither lost nor repeated. When the worker dies, streams wait up to `worker_lost_timeout_s` for the next
    one and go on there; with `resume=False` they end with `WorkerLost`.
    `on_event` is called on the I/O thread. Prompts are tokenised on the thread that asks.
    A client does not survive a fork: make a new one in the child.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        model: str | None = None,
        name: str = "zmqengine-client",
        keys: CurveKeys | None = None,
        session_secret: bytes | None = None,
        connect_timeout_s: float | None = None,
        ready_timeout_s: float | None = 600.0,
        answer_timeout_s: float = 10.0,
        worker_lost_timeout_s: float = 60.0,
        resume: bool = True,
        on_event: Callable[[ClientEvent], None] | None = None,
    ) -> None:
        if address is None and model is None and (launcher := stand_in()) is not None:
            address, model = launcher, ""
        config = SessionConfig(
            address=launcher_at(address) if model is not None else resolve(address),
            model=model,
            name=name[:128],
            session_secret=session_secret or secrets.token_bytes(32),
            connect_timeout_s=connect_timeout_s,
            ready_timeout_s=ready_timeout_s,
            answer_timeout_s=answer_timeout_s,
            worker_lost_timeout_s=worker_lost_timeout_s,
            resume=resume,
        )
        self._session = ClientSession(config)
        self._driver = IoThread(self._session, keys or keys_from_environment(), on_event)
        self._questions = Questions(self._driver)
        self._tokenizer = ModelTokenizer(self._questions, self._session.connection)
        self._preparation = Preparation(self._tokenizer, self._driver)
        self._embedding = Embedding(self._driver, self._tokenizer, self._questions, self._session.connection)
        self._reranking = Reranking(self._driver, self._tokenizer, self._embedding)
        self._deciding = Deciding(self._driver, self._tokenizer)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort running requests, say bye, close the sockets. Idempotent; takes at most two seconds."""
        self._preparation.cancel()
        self._driver.close()

    def fail(self, error: ZmqEngineError) -> None:
        """End every request and call with `error`: of a worker that is known not to come back."""
        self._driver.post(lambda now: self._session.fail(error))

    # --- the worker ----------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """The worker's identity, model, limits and state."""
        return self._questions.ask(Describe, Description)

    def status(self) -> Status:
        """Numbers for operators."""
        return self._questions.ask(GetStatus, Status)

    def metrics(self) -> str:
        """The numbers for a Prometheus scraper, as text."""
        return (self._questions.ask(GetMetrics, Metrics)).text

    def drain(self) -> None:
        """Make the worker finish its running requests and exit. Raises `NotAuthorized` without an operator's key."""
        self._questions.tell(Drain)

    def end_request(self, session: str, request: str) -> None:
        """End a request of any session, as `status` names them, if it has not ended. Raises `NotAuthorized` without an
        operator's key.
        """
        self._questions.tell(lambda call: EndRequest(call, session, request))

    def load_adapter(self, name: str, directory: str, *, timeout_s: float | None = 600.0) -> None:
        """Add a LoRA adapter to the model for requests with `adapter=name`, from a directory of the worker's machine.
        What runs goes on. One that is loaded already is left as it is.

        Raises `ModelLoadError` for files that are not an adapter of this model, `NeverFits` or `Overloaded` where there
        is no memory for it, `Conflict` for other contents of this name, or `NotAuthorized` without an operator's key.
        """
        self._questions.tell(lambda call: LoadAdapter(call, name, directory), timeout_s)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter: new requests are refused at once, and its memory is free when the last one that has it
        has ended. One that is not there is passed over. Raises `NotAuthorized` without an operator's key.
        """
        self._questions.tell(lambda call: UnloadAdapter(call, name))

    def ping(self) -> float:
        """Seconds to the worker's control thread and back."""
        started = time.perf_counter()
        self._questions.tell(Ping)
        return time.perf_counter() - started

    def ask(self, make: Callable[[int], ControlRequest], kind: type[ReplyT]) -> ReplyT:
        """Send any ctl call of SPEC.md: `make` builds it from its call id; the reply is of this `kind`.

        Raises the error with which the worker rejects it.
        """
        return self._questions.ask(make, kind)

    def wait_ready(self, timeout_s: float | None = None) -> Description:
        """Wait until the worker takes requests; None is `connect_timeout_s` for a sign of life, then `ready_timeout_s`.

        Raises `WorkerLost`, `NotReady`, `ModelLoadError` or `Draining`.
        """
        return self._questions.wait_ready(timeout_s)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: from this process, from disk, or fetched from the worker."""
        return self._tokenizer.get()

    @property
    def counters(self) -> ClientCounters:
        """Totals since the client was made."""
        return msgspec.structs.replace(self._session.outbox.counters)

    # --- generating ----------------------------------------------------------------------------------------

    def generate_tokens(
        self, prompt: Sequence[int], *, images: Sequence[PromptImage] = (), **options: Unpack[Options]
    ) -> TokenStream:
        """Token ids in, token ids out. Returns at once; a refusal is raised when the stream is read.

        `images` are those of `place_images`, which has put their tokens into the prompt.
        """
        self._driver.check()
        request = new_request(options)
        request.images = images
        set_token_prompt(request, prompt)
        request.listener = notifier = Notifier()
        if not request.ended:
            self._driver.start(request)
        return TokenStream(TokenReader(request), notifier, self)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        images: Sequence[ImageLike] = (),
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> TextStream:
        """Text that continues `prompt`, up to a stop string. The prompt is tokenised on this thread.

        `images` come before the prompt, unless it has the model's marker of an image in the place of each.
        """
        return self._generate_text(prompt_encoder(prompt, images), stop, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> TextStream:
        """The model's answer to a conversation, laid out by its chat template.

        A part `{"type": "image", "image": ...}` of a message is an image: a path, the bytes of a PNG, JPEG, WebP or GIF
        file, a data URL or a PIL image. It needs the extra `vision`, and a model that sees.
        """
        return self._generate_text(chat_encoder(messages, tools, chat_template_kwargs), stop, options)

    @overload
    def select(self, streams: Iterable[TextStream]) -> Iterator[tuple[TextStream, TextChunk | None]]: ...

    @overload
    def select(self, streams: Iterable[TokenStream]) -> Iterator[tuple[TokenStream, TokenChunk | None]]: ...

    def select(self, streams: Iterable[Stream[Any]]) -> Iterator[tuple[Any, Any]]:
        """Chunks of many streams on one thread, as they come: `(stream, chunk)`, and `(stream, None)` at its end.

        Errors of streams are not raised here: `stream.result` raises them. Leaving the loop early aborts no stream.
        """
        group = Group[Any]()
        reading = list(streams)
        for stream in reading:
            group.add(stream)
        try:
            while len(group):
                for notifier in group._ready():
                    # One at a time: news taken and not yielded would be lost when the loop is left.
                    news = group._take(notifier)
                    if news is not None and news.chunk is not None:
                        yield news.stream, news.chunk
                    if news is not None and news.ended:
                        yield news.stream, None
        finally:
            for stream in reading:
                group.discard(stream)

    def _generate_text(self, encode: Encode, stop: str | Sequence[str], options: Options) -> TextStream:
        self._driver.check()
        request = new_request(options)
        reader = new_text_reader(request, stop)
        request.listener = notifier = Notifier()
        if not request.ended:
            self._preparation.begin(request, reader, encode)
        return TextStream(reader, notifier, self)

    def decide(
        self,
        state: object,
        questions: Mapping[str, Question | Mapping[str, object]],
        **options: Unpack[DecideOptions],
    ) -> Decisions:
        """The probability of each answer to each question about `state`, a text or anything that JSON can write.

        A question is a `YesNo`, a `OneOf` or a `Score`, or a mapping with their fields and the `type` yes_no, choice
        or score. Nothing is sampled: an answer has the probability with which the model would begin its own with it.
        """
        self._driver.check()
        check_names(options, DecideOptions)
        return self._deciding.decide(state, questions_of(questions), options)

    # --- vectors -------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        prompt: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Vectors of texts, or of lists of token ids: an array (texts, floats) of float32, each of length 1.

        `dimensions` is the number of leading floats to keep. `prompt` is the name of a prompt of the model that goes
        before each text, such as `query`.
        """
        return (self.embed_counted(texts, dimensions=dimensions, prompt=prompt, **options)).vectors

    def embed_counted(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        prompt: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedded:
        """Vectors as `embed` returns them, with the number of tokens read."""
        self._driver.check()
        check_names(options, EmbedOptions)
        source = source_of(texts, prompt)
        return self._embedding.vectors(len(texts), source, "embedding", dimensions, options)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[Ranked]:
        """All documents by index, from the one that answers the query best, with scores from 0 to 1.

        `instruction` tells a model that is asked in words, such as Qwen3-Reranker, what to look for.
        """
        return (self.rerank_counted(query, documents, instruction=instruction, **options)).ranked

    def rerank_counted(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Reranked:
        """Ranked documents as `rerank` returns them, with the number of tokens read."""
        self._driver.check()
        check_names(options, EmbedOptions)
        return self._reranking.rerank(query, documents, instruction, options)

    # --- for streams ---------------------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        """Used by streams; call `stream.abort()`."""
        self._driver.abort(request)

    def check(self) -> None:
        """Raise RuntimeError if nothing can arrive any more.

        The client is closed, belongs to another process, or this is its own I/O thread.
        """
        self._driver.check_waiting()
