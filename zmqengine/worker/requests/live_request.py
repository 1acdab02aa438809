"""One live request. The only mutable state of a generation; everything else refers to it."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Literal

import msgspec

from zmqengine.engine.interface import RowRequest
from zmqengine.protocol.messages import End, Insert
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.requests.token_log import TokenLog

if TYPE_CHECKING:
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.worker.requests.restore import Restore

Phase = Literal["preparing", "queued", "running", "parked", "ended"]
"""What a request does. `docs/worker.md` draws how they follow each other; only `rows.py` and `finish` change them.

preparing: work that its start needs goes on beside the actor. queued: waits for its first row. running: has a row
in the engine. parked: had a row, and waits for another one. ended: has its terminal answer.
"""

_encoder = msgspec.msgpack.Encoder()


class LiveRequest:
    """From acceptance to acknowledgement.

    `tokens_max` bounds prompt and output together; of a request that *is open*, which named no limit, it is what memory
    allows, and may fall with that. In the engine it has memory for `reserved_tokens`, of which
    `prefilled_tokens` have been read; when its output is `grows_at` long it needs more. `read_tokens` were read in
    earlier stays in the engine. `grammar` is what the output must follow; `is_whole` says that what the request
    brought along is a whole output of it. `drafts` are tokens proposed and accepted, by who proposed them. `restore` is
    what comes from disk before the request waits for a row.
    """

    __slots__ = (
        "accepted_s",
        "admitted_s",
        "arrival_pass",
        "cache_scope",
        "cached_tokens",
        "charged_tokens",
        "digest",
        "drafts",
        "end",
        "end_sent",
        "first_token_s",
        "grammar",
        "grows_at",
        "id",
        "insert",
        "is_open",
        "is_whole",
        "joined_at",
        "last_token_s",
        "log",
        "parked_row",
        "phase",
        "prefill_pass",
        "prefilled_tokens",
        "progress_told",
        "prompt",
        "prompt_tokens",
        "read_tokens",
        "reserved_bytes",
        "reserved_tokens",
        "restore",
        "row",
        "seed",
        "session_id",
        "stop_token_ids",
        "ticket",
        "tokens_max",
    )

    def __init__(
        self,
        insert: Insert,
        session_id: str,
        ticket: Ticket,
        *,
        seed: int,
        cache_scope: str = "",
        stop_token_ids: frozenset[int],
        tokens_max: int,
    ) -> None:
        self.id = insert.request
        self.session_id = session_id
        self.ticket = ticket
        self.insert: Insert | None = insert
        self.prompt: array[int] | list[int] = insert.prompt
        self.prompt_tokens = len(insert.prompt)
        self.digest: bytes | None = None
        self.grammar: Grammar | None = None
        self.is_whole = False
        self.restore: Restore | None = None
        self.seed = seed
        self.cache_scope = cache_scope
        self.stop_token_ids = stop_token_ids
        self.tokens_max = tokens_max
        self.is_open = insert.max_tokens is None
        self.log = TokenLog(insert.emitted, with_logprobs=insert.logprobs is not None)
        self.phase: Phase = "preparing"
        self.row = self.parked_row = -1
        self.reserved_tokens = self.reserved_bytes = 0
        self.grows_at = 0
        self.joined_at = 0
        self.prefilled_tokens = 0
        self.arrival_pass = 0
        self.accepted_s = ticket.waiting_since_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.prefill_pass = -1
        self.cached_tokens = 0
        self.read_tokens = 0
        self.charged_tokens = len(insert.emitted)
        self.progress_told = False
        self.drafts: dict[str, tuple[int, int]] = {}
        self.end: End | None = None
        self.end_sent = False

    @property
    def is_fully_sent(self) -> bool:
        """Whether every token and the terminal answer were handed to the socket."""
        return self.end_sent and self.log.sent == len(self.log)

    @property
    def tokens_held(self) -> int:
        """Tokens of prompt and output so far."""
        return self.prompt_tokens + len(self.log)

    def row_request(self, row: int) -> RowRequest:
        """The engine's request for this row, resumed after the tokens in the log."""
        insert = self.insert
        assert insert is not None, "an ended request is not generated again"
        return RowRequest(
            row=row,
            prompt=self.prompt,
            emitted=self.log.tokens.tolist(),
            max_tokens=self.tokens_max - self.prompt_tokens,
            sampling=insert.sampling,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=insert.logprobs,
            grammar=self.grammar,
            cache_scope=self.cache_scope,
            pin=insert.pin,
            speculate=insert.speculate,
            prediction=insert.prediction,
        )

    def is_of(self, insert: Insert) -> bool:
        """Whether a repeated insert has the same contents."""
        if self.digest is None:
            assert self.insert is not None, "an ended request has its digest"
            self.digest = digest(self.insert)
        return self.digest == digest(insert)

    def finish(self, end: End) -> None:
        """Enter the last phase. Frees the prompt: what remains is the output."""
        assert self.end is None, "a request has one terminal answer"
        if self.digest is None and self.insert is not None:
            self.digest = digest(self.insert)
        self.end = end
        self.phase = "ended"
        self.insert = None
        self.prompt = []


def digest(insert: Insert) -> bytes:
    """Digest of an insert without its call number, to tell a repetition from another insert with the same id."""
    return hashlib.blake2b(_encoder.encode(msgspec.structs.replace(insert, call=0)), digest_size=16).digest()
