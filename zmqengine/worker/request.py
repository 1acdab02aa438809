"""One live request. The only mutable state of a generation; everything else refers to it."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Literal

import msgspec

from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.protocol.messages import End, Insert
from zmqengine.worker.token_log import TokenLog

if TYPE_CHECKING:
    from zmqengine.worker.sessions import Session

Phase = Literal["queued", "running", "ended"]

_encoder = msgspec.msgpack.Encoder()


class LiveRequest:
    """From acceptance to acknowledgement: queued -> running -> ended; an engine failure leads back to queued."""

    __slots__ = (
        "accepted_s",
        "admitted_s",
        "arrival",
        "arrival_pass",
        "cached_tokens",
        "deadline_s",
        "digest",
        "end",
        "end_sent",
        "id",
        "insert",
        "last_token_s",
        "log",
        "phase",
        "prefill_pass",
        "prefilled_tokens",
        "priority",
        "progress_told",
        "projected_bytes",
        "prompt_tokens",
        "row",
        "seed",
        "session",
        "stop_token_ids",
        "strikes",
    )

    def __init__(
        self,
        session: Session,
        insert: Insert,
        *,
        digest: bytes,
        arrival: int,
        arrival_pass: int,
        eos_token_ids: frozenset[int],
        projected_bytes: int,
        now_s: float,
    ) -> None:
        self.id = insert.request
        self.session = session
        self.insert: Insert | None = insert
        self.digest = digest
        self.arrival = arrival
        self.arrival_pass = arrival_pass
        self.prefill_pass = -1
        self.priority = insert.priority
        self.seed = secrets.randbits(63) if insert.seed is None else insert.seed
        stops = frozenset(insert.stop_token_ids)
        self.stop_token_ids = stops if insert.ignore_eos else stops | eos_token_ids
        self.deadline_s = None if insert.deadline_ms is None else now_s + insert.deadline_ms / 1000
        self.prompt_tokens = len(insert.prompt)
        self.projected_bytes = projected_bytes
        self.log = TokenLog(insert.emitted, with_logprobs=insert.logprobs is not None)
        self.phase: Phase = "queued"
        self.row = -1
        self.cached_tokens = 0
        self.prefilled_tokens = 0
        self.accepted_s = now_s
        self.admitted_s: float | None = None
        self.last_token_s: float | None = None
        self.progress_told = False
        self.strikes = 0
        self.end: End | None = None
        self.end_sent = False

    @property
    def is_fully_sent(self) -> bool:
        """Whether every token and the terminal answer were handed to the socket."""
        return self.end_sent and self.log.sent == len(self.log)

    def row_request(self, row: int) -> RowRequest:
        """What the engine needs to go on from the tokens in the log."""
        insert = self.insert
        assert insert is not None, "an ended request is not generated again"
        fields = insert.sampling
        return RowRequest(
            row=row,
            prompt=insert.prompt,
            emitted=self.log.tokens.tolist(),
            max_tokens=insert.max_tokens,
            sampling=Sampling(
                temperature=fields.temperature,
                top_p=fields.top_p,
                top_k=fields.top_k,
                min_p=fields.min_p,
                repetition_penalty=fields.repetition_penalty,
                presence_penalty=fields.presence_penalty,
                frequency_penalty=fields.frequency_penalty,
                logit_bias=fields.logit_bias,
            ),
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=insert.logprobs,
        )

    def finish(self, end: End) -> None:
        """Enter the last phase. Frees the prompt: what remains is the output."""
        assert self.end is None, "a request has one terminal answer"
        self.end = end
        self.phase = "ended"
        self.insert = None


def digest(insert: Insert) -> bytes:
    """What tells a repeated insert from another one with the same id: everything but the call number."""
    return hashlib.blake2b(_encoder.encode(msgspec.structs.replace(insert, call=0)), digest_size=16).digest()
