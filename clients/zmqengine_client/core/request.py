"""One live request, seen from the front-end: what it asked for, what has arrived, how it ended."""

from __future__ import annotations

from math import inf

from zmqengine.errors import BY_CODE, GenerationFailed, ZmqEngineError
from zmqengine.protocol.messages import End, TokenLogprob, TokenRow
from zmqengine_client.core.chunks import Completion, PromptProgress
from zmqengine_client.core.options import RequestOptions
from zmqengine_client.core.outbox import Listener
from zmqengine_client.core.phases import REQUEST, RequestEvent, RequestPhase, follow

AHEAD_ROWS_MAX = 1024
ENDED_NORMALLY = ("stop", "length", "abort")


class Request:
    """The one mutable record of a request. The core writes it; a reader takes `tokens` from a place of its own on.

    `logprobs` is extended before `tokens`, and both before `end` or `error` is set.
    """

    __slots__ = (
        "aborting",
        "added_at",
        "ahead",
        "changed",
        "deadline_at",
        "end",
        "error",
        "id",
        "inserted_tokens",
        "listener",
        "logprobs",
        "max_tokens",
        "missing",
        "open_ended",
        "options",
        "phase",
        "progress",
        "prompt",
        "resumed",
        "resuming",
        "retry_at",
        "seed",
        "tokens",
        "was_accepted",
    )

    def __init__(self, prompt: list[int], options: RequestOptions, listener: Listener | None = None) -> None:
        self.id = options.request_id
        self.prompt = prompt
        self.options = options
        self.listener = listener
        self.max_tokens = options.max_tokens or 0
        self.open_ended = False
        self.seed = options.seed
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if options.logprobs is None else []
        self.progress: PromptProgress | None = None
        self.end: End | None = None
        self.error: ZmqEngineError | None = None
        self.phase = RequestPhase.WAITING
        self.was_accepted = False
        self.aborting = False
        self.resuming = False
        self.resumed = 0
        self.inserted_tokens = 0
        self.missing = 0
        self.ahead: list[TokenRow] = []
        self.added_at = 0.0
        self.retry_at = inf
        self.deadline_at = inf
        self.changed = False

    @property
    def may_have_run(self) -> bool:
        """Whether the worker is known to have taken it: tokens can be here before `accepted` is."""
        return self.was_accepted or bool(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.end is not None or self.error is not None

    def may(self, event: RequestEvent) -> bool:
        """Whether this can happen to it now."""
        return event in REQUEST[self.phase]

    def follow(self, event: RequestEvent) -> None:
        """Go to the phase after `event`."""
        self.phase = follow(REQUEST, self.phase, event)

    def refuse(self, error: ZmqEngineError) -> None:
        """End it with this error, if it has not ended: it was never sent."""
        if not self.ended:
            self.error = error
            self.follow(RequestEvent.ENDED)

    def receive(self, row: TokenRow) -> int:
        """Append what is new in `row`; returns how many of its tokens were there already.

        A row that starts beyond what is here is kept until the gap before it is filled; the result is then -1.
        """
        have = len(self.tokens)
        known = have - row.first_index
        if known < 0:
            if len(self.ahead) < AHEAD_ROWS_MAX:
                self.ahead.append(row)
            return -1
        known = min(known, len(row.tokens))
        if self.logprobs is not None and row.logprobs is not None:
            self.logprobs.extend(row.logprobs[known:])
        self.tokens.extend(row.tokens[known:] if known else row.tokens)
        if row.end is not None and row.first_index + len(row.tokens) == len(self.tokens):
            self.end = row.end
        return known

    def receive_kept(self) -> None:
        """Append the rows that were kept, as far as they follow on."""
        kept, self.ahead = self.ahead, []
        for row in kept:
            if self.end is None:
                self.receive(row)

    def ends_by_itself(self, eos_token_ids: frozenset[int]) -> End | None:
        """The end that the worker never told, if the tokens that are here are a whole output."""
        stops = self.tokens and (
            self.tokens[-1] in self.options.stop_token_ids
            or (not self.options.ignore_eos and self.tokens[-1] in eos_token_ids)
        )
        if stops or (self.tokens and len(self.tokens) >= self.max_tokens):
            return End("stop" if stops else "length", prompt_tokens=len(self.prompt))
        return None

    def completion(self) -> Completion:
        """What there is, as a completion."""
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
        )

    def failure(self) -> ZmqEngineError | None:
        """The error this request ended with, or None if it ended as asked (stop, length, own abort)."""
        if self.error is not None:
            return self.error
        if self.end is None or self.end.finish in ENDED_NORMALLY:
            return None
        error = BY_CODE.get(self.end.code or self.end.finish, GenerationFailed)
        # Kept, so that every reader gets the same exception.
        self.error = error(self.end.message or f"the request ended with {self.end.finish}")
        return self.error
