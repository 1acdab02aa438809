"""Sizes of the replay, and the machine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class ScheduleOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work, and a machine of about one large GPU with a model of 8 billion parameters.

    `load` is the work that arrives against what the machine can do; with a trace file, the file says when.
    A step takes `step_ms`, `step_row_us` for each row and `step_kv_us` for each 1,000 tokens of KV cache that is
    read, and `1 / prefill_tokens_per_s` for each prompt token. `parked_tokens` is the KV cache of parked rows that
    is kept. Jain's index is taken over each `window_s`.
    """

    sessions: Count = 1_000
    requests: Count = 100_000
    load: Positive = 1.0

    rows: Count = 64
    prefill_chunk: Count = 2_048
    prefill_tokens_per_s: Positive = 20_000.0
    step_ms: Positive = 10.0
    step_row_us: NotNegative = 100.0
    step_kv_us: NotNegative = 25.0
    kv_tokens: Count = 120_000
    parked_tokens: Annotated[int, Meta(ge=0)] = 40_000
    growth_tokens: Count = 64

    window_s: Positive = 600.0
    operations_waiting: Count = 100_000

    def has_room(self, rows: int, kv_tokens: int) -> bool:
        """Whether one more row fits beside `rows`, if all of them then hold `kv_tokens`. A row alone always does."""
        growth = (rows + 1) * self.growth_tokens
        return not rows or (rows < self.rows and kv_tokens + growth <= self.kv_tokens)


SMALL = ScheduleOptions(
    sessions=40, requests=1_500, rows=8, kv_tokens=16_000, window_s=60.0, operations_waiting=500
)
