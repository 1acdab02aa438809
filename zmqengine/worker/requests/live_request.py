"""A live request: the only mutable state of a generation, shared by all parts of the worker."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.engine.interface import RowImage, RowRequest, TextsRequest
from zmqengine.protocol.messages import Embed, End, Insert
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.requests.token_log import TokenLog
from zmqengine.worker.requests.vector_log import VectorLog

if TYPE_CHECKING:
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.engine.grammar.thinking import ThinkingBound

Phase = Literal["preparing", "queued", "running", "parked", "ended"]
"""Phase of a request. `docs/worker.md` draws the transitions; the scheduler and `finish` make them.

preparing: work before its first row runs beside the actor. queued: waits for its first row. running: has a row in the
engine. parked: lost its row, to preemption or a failed step, and waits for another one. ended: has its terminal answer.
"""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of a preparation. `packed` is the prompt as an array and the insert's digest.

    `is_whole`: `emitted` is already a complete output under `grammar`. `thinking` bounds the reasoning, its markers
    found by their text. `blocks`: those of its prompt that were read from disk, with nothing else.
    """

    packed: tuple[array[int], bytes] | None = None
    grammar: Grammar | None = None
    is_whole: bool = False
    thinking: ThinkingBound | None = None
    blocks: deque[Any] | None = None


class LiveRequest:
    """A request from acceptance to acknowledgement.

    `tokens_max` bounds prompt and output together. A request that *is open* has no limit of its own: its bound is what
    fits in memory, and may fall with the memory limit. `reserved_tokens` of KV cache are reserved for a running
    request, of which `prefilled_tokens` have been prefilled; at `grows_at` output tokens it needs a larger reservation.
    `read_tokens`: maximum tokens that earlier rows of a preempted request had computed. `grammar` constrains the
    output; `is_whole`: the emitted tokens are already a complete output of it. `thinking` bounds its reasoning.
    `drafts` counts proposed and accepted draft tokens by source; `kept_tokens`: those of a prompt that is read in part.

    The request of an embed has the vectors of its texts as output. It reserves KV cache for its longest text, of
    `tokens_max`: the engine holds that of one at a time.
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
        "forced_tokens",
        "grammar",
        "grows_at",
        "id",
        "images",
        "insert",
        "is_open",
        "is_whole",
        "joined_at",
        "kept_tokens",
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
        "row",
        "seed",
        "session_id",
        "stop_token_ids",
        "thinking",
        "ticket",
        "tokens_max",
    )

    def __init__(
        self,
        insert: Insert | Embed,
        session_id: str,
        ticket: Ticket,
        *,
        seed: int = 0,
        cache_scope: str = "",
        stop_token_ids: frozenset[int] = frozenset(),
        tokens_max: int = 0,
        vector_width: int = 0,
        images: Sequence[RowImage] = (),
    ) -> None:
        self.id = insert.request
        self.session_id = session_id
        self.ticket = ticket
        self.insert: Insert | Embed | None = insert
        self.images = images
        self.log: TokenLog | VectorLog
        if isinstance(insert, Embed):
            self.prompt: array[int] | list[int] = []
            self.prompt_tokens = sum(map(len, insert.texts))
            self.log = VectorLog(insert.first_index, len(insert.texts), vector_width)
            self.is_open = False
            self.charged_tokens = 0
        else:
            self.prompt = insert.prompt
            self.prompt_tokens = len(insert.prompt)
            self.log = TokenLog(insert.emitted, logprobs=insert.logprobs)
            self.is_open = insert.max_tokens is None
            self.charged_tokens = max(len(insert.emitted), len(insert.forced))
        self.forced_tokens = 0 if isinstance(insert, Embed) else len(insert.forced)
        self.digest: bytes | None = None
        self.grammar: Grammar | None = None
        self.is_whole = False
        self.thinking: ThinkingBound | None = None
        if isinstance(insert, Insert) and insert.thinking_max is not None:
            self.thinking = thinking_bound(**msgspec.structs.asdict(insert.thinking_max))
        self.seed = seed
        self.cache_scope = cache_scope
        self.stop_token_ids = stop_token_ids
        self.tokens_max = tokens_max
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
        self.cached_tokens = self.kept_tokens = 0
        self.read_tokens = 0
        self.progress_told = False
        self.drafts: dict[str, tuple[int, int]] = {}
        self.end: End | None = None
        self.end_sent = False

    @property
    def is_fully_sent(self) -> bool:
        """Whether every token and the terminal answer were sent."""
        return self.end_sent and self.log.sent == len(self.log)

    @property
    def embeds(self) -> bool:
        """Whether its output is vectors."""
        return isinstance(self.log, VectorLog)

    @property
    def tokens(self) -> TokenLog:
        """The output of an insert."""
        assert isinstance(self.log, TokenLog)
        return self.log

    @property
    def vectors(self) -> VectorLog:
        """The output of an embed."""
        assert isinstance(self.log, VectorLog)
        return self.log

    @property
    def output_tokens(self) -> int:
        """Output tokens so far; none of an embed."""
        return 0 if self.embeds else len(self.log)

    @property
    def tokens_held(self) -> int:
        """Tokens in the KV cache of its row: prompt, output so far and forced output, or a text of an embed."""
        return self.tokens_max if self.embeds else self.prompt_tokens + max(len(self.log), self.forced_tokens)

    def texts_request(self, row: int) -> TextsRequest:
        """The engine's request for a row of the texts that have no vector yet."""
        insert = self.insert
        assert isinstance(insert, Embed), "an ended request is not computed again"
        done = len(self.log) - insert.first_index
        return TextsRequest(
            row, insert.texts[done:], insert.second[done:], insert.output, insert.dimensions, self.cache_scope
        )

    def row_request(self, row: int) -> RowRequest:
        """The engine's request for a row that continues after the tokens in the log."""
        insert = self.insert
        assert isinstance(insert, Insert), "an ended request is not generated again"
        return RowRequest(
            row=row,
            prompt=self.prompt,
            emitted=self.tokens.tokens.tolist(),
            max_tokens=self.tokens_max - self.prompt_tokens,
            sampling=insert.sampling,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=insert.logprobs,
            grammar=self.grammar,
            thinking=self.thinking,
            cache_scope=self.cache_scope,
            adapter=insert.adapter,
            pin=insert.pin,
            speculate=insert.speculate,
            prediction=insert.prediction,
            images=self.images,
            forced=insert.forced,
            prefill_keep=insert.prefill_keep,
        )

    def apply(self, prepared: Prepared) -> None:
        """Store the result of a preparation."""
        if prepared.packed is not None:
            self.prompt, self.digest = prepared.packed
        if prepared.grammar is not None:
            self.grammar, self.is_whole = prepared.grammar, prepared.is_whole
        if prepared.thinking is not None:
            self.thinking = prepared.thinking

    def is_of(self, insert: Insert | Embed) -> bool:
        """Whether an insert with this request's id has the same contents."""
        if self.digest is None:
            assert self.insert is not None, "an ended request has its digest"
            self.digest = digest(self.insert)
        return self.digest == digest(insert)

    def finish(self, end: End) -> None:
        """Enter the last phase. Frees the prompt and the grammar; the output stays for replays."""
        assert self.end is None, "a request has one terminal answer"
        if self.digest is None and self.insert is not None:
            self.digest = digest(self.insert)
        self.end = end
        self.phase = "ended"
        self.insert = None
        self.prompt = []
        self.grammar = self.thinking = None
        self.images = ()


def digest(insert: Insert | Embed) -> bytes:
    """Digest of a command without its call number, to tell a repetition from another one with the same id."""
    packed = insert.KIND + _encoder.encode(msgspec.structs.replace(insert, call=0))
    return hashlib.blake2b(packed, digest_size=16).digest()
