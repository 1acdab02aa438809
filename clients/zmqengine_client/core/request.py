"""One request on the front-end's side: its options, its output so far, its end, and its reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from zmqengine.errors import BY_CODE, BadRequest, GenerationFailed, ZmqEngineError
from zmqengine.protocol.messages import Embed, End, TokenLogprob, TokenRow
from zmqengine_client.core.chunks import Completion, PromptProgress, TokenChunk
from zmqengine_client.core.options import Options, RequestOptions, check_options, make_options, token_ids
from zmqengine_client.core.outbox import Listener
from zmqengine_client.core.phases import REQUEST, RequestEvent, RequestPhase, follow
from zmqengine_client.images.prompt_image import PromptImage

AHEAD_ROWS_MAX = 1024
ENDED_NORMALLY = ("stop", "length", "abort")


@dataclass(eq=False, slots=True)
class Request:
    """The one mutable record of a request. The core writes it; a reader takes `tokens` from its own position on.

    `logprobs` is extended before `tokens`, and both before `end` or `error` is set. An embed has its command as `texts`
    and its output in `vectors`.
    """

    prompt: list[int]
    options: RequestOptions
    listener: Listener | None = None
    texts: Embed | None = None
    images: Sequence[PromptImage] = ()
    images_wanted: int = 0
    id: str = field(init=False)
    seed: int = field(init=False)
    max_tokens: int = field(init=False)
    open_ended: bool = False
    tokens: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    progress: PromptProgress | None = None
    end: End | None = None
    error: ZmqEngineError | None = None
    phase: RequestPhase = RequestPhase.WAITING
    was_accepted: bool = False
    aborting: bool = False
    resuming: bool = False
    resumed: int = 0
    inserted_tokens: int = 0
    missing: int = 0
    ahead: list[TokenRow] = field(default_factory=list)
    added_at: float = 0.0
    retry_at: float = inf
    deadline_at: float = inf
    changed: bool = False

    def __post_init__(self) -> None:
        options = self.options
        self.id, self.seed, self.max_tokens = options.request_id, options.seed, options.max_tokens or 0
        if options.logprobs is not None:
            self.logprobs = []

    @property
    def may_have_run(self) -> bool:
        """Whether the worker may have run it: tokens can arrive before `accepted`."""
        return self.was_accepted or self.have > 0

    @property
    def have(self) -> int:
        """The index of the next token or vector."""
        return len(self.tokens) + len(self.vectors)

    @property
    def ended(self) -> bool:
        """Whether it has its end or an error."""
        return self.end is not None or self.error is not None

    def may(self, event: RequestEvent) -> bool:
        """Whether this event is possible in its phase."""
        return event in REQUEST[self.phase]

    def follow(self, event: RequestEvent) -> None:
        """Go to the phase after `event`."""
        self.phase = follow(REQUEST, self.phase, event)

    def refuse(self, error: ZmqEngineError) -> None:
        """End an unsent request with this error, if it has not ended."""
        if not self.ended:
            self.error = error
            self.follow(RequestEvent.ENDED)

    def receive(self, row: TokenRow) -> int:
        """Append the new tokens or vectors of `row`; returns how many of them were duplicates.

        A row that starts after a gap is kept until the gap is filled; the result is then -1.
        """
        known = self.have - row.first_index
        if known < 0:
            if len(self.ahead) < AHEAD_ROWS_MAX:
                self.ahead.append(row)
            return -1
        known = min(known, row.count)
        if self.logprobs is not None and row.logprobs is not None:
            self.logprobs.extend(row.logprobs[known:])
        self.tokens.extend(row.tokens[known:] if known else row.tokens)
        if row.vectors is not None:
            self.vectors.extend(row.vectors[known:])
        if row.end is not None and row.first_index + row.count == self.have:
            self.end = row.end
        return known

    def receive_kept(self) -> None:
        """Append the kept rows that now follow without a gap."""
        kept, self.ahead = self.ahead, []
        for row in kept:
            if self.end is None:
                self.receive(row)

    def completion(self) -> Completion:
        """The output so far, as a completion."""
        end = self.end
        cached = self.progress.cached if self.progress is not None else 0
        finish = end.finish if end is not None else self.error.code if self.error is not None else "abort"
        message = end.message if end is not None else self.error.message if self.error is not None else ""
        return Completion(
            finish=finish,
            tokens=list(self.tokens),
            prompt_tokens=len(self.prompt),
            cached_tokens=end.cached_tokens if end is not None else cached,
            seed=self.seed,
            request_id=self.id,
            resumed=self.resumed,
            message=message,
            queue_ms=end.queue_ms if end is not None else 0.0,
            prefill_ms=end.prefill_ms if end is not None else 0.0,
            decode_ms=end.decode_ms if end is not None else 0.0,
            drafts=end.drafts if end is not None else {},
            kept_tokens=end.kept_tokens if end is not None else 0,
        )

    def failure(self) -> ZmqEngineError | None:
        """The error this request ended with, or None if it ended as asked (stop, length, own abort)."""
        if self.error is not None:
            return self.error
        if self.end is None or self.end.finish in ENDED_NORMALLY:
            return None
        error = BY_CODE.get(self.end.code or self.end.finish, GenerationFailed)
        # Cached, so that every reader gets the same exception.
        self.error = error(self.end.message or f"the request ended with {self.end.finish}")
        return self.error


def new_request(options: Options) -> Request:
    """A request without a prompt. An invalid option ends it at once, for the stream to raise."""
    request = Request([], make_options(options))
    try:
        check_options(request.options)
    except ZmqEngineError as error:
        request.refuse(error)
    return request


def set_token_prompt(request: Request, prompt: Sequence[int]) -> None:
    """Set the prompt of a request; anything but a list of token ids ends it."""
    if request.ended:
        return
    try:
        request.prompt = token_ids(prompt)
        if isinstance(request.options.prediction, str):
            raise BadRequest("prediction: give token ids beside a prompt of token ids")
        if isinstance(request.options.thinking_max, int):
            raise BadRequest("thinking_max: give a ThinkingMax beside a prompt of token ids")
    except ZmqEngineError as error:
        request.refuse(error)


class TokenReader:
    """A reader of the tokens of a request, with its own position."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._next = 0

    def take(self) -> TokenChunk | None:
        """All tokens since the last call, or None. No more follow once `finished` is true."""
        request, first = self.request, self._next
        self._next = end = len(request.tokens)
        if end == first:
            return None
        logprobs = request.logprobs[first:end] if request.logprobs is not None else None
        return TokenChunk(first, request.tokens[first:end], logprobs)

    @property
    def finished(self) -> bool:
        """Whether all of the output has been taken."""
        return self.request.ended and self._next == len(self.request.tokens)

    @property
    def wants_abort(self) -> bool:
        """Whether the worker may stop: never for a stream of tokens."""
        return False

    def completion(self) -> Completion:
        return self.request.completion()

    def failure(self) -> ZmqEngineError | None:
        """The error the request ended with."""
        return self.request.failure()
