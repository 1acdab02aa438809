"""Counters of the actor since it started, under the names that `status` and the metrics use."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqengine.worker.telemetry.latencies import Latencies


@dataclass(slots=True)
class Counters:
    """Counters that only grow."""

    passes: int = 0
    commands: int = 0
    accepted: int = 0
    rejected: int = 0
    resumes: int = 0
    tokens: int = 0
    parked: int = 0
    """Preempted rows."""
    tokens_read_again: int = 0
    """Tokens prefilled again after a preemption or a failed batch, prompt and output."""
    vectors: int = 0
    """Computed embeddings and scores."""
    engine_failures: int = 0
    refused_subscriptions: int = 0
    slow_passes: int = 0
    admission_wait_passes_max: int = 0
    """Maximum passes from a request's arrival to its first prefill, waiting for a row or memory included."""
    ends: int = 0
    """Terminal answers by kind."""
    ended: dict[str, int] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)
    """Proposed draft tokens by source."""
    drafts_accepted: dict[str, int] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)

    def count_end(self, finish: str) -> None:
        self.ends += 1
        self.ended[finish] = self.ended.get(finish, 0) + 1

    def count_draft(self, source: str, proposed: int, accepted: int) -> None:
        """Count `proposed` draft tokens for a row, and the `accepted` ones among them."""
        self.drafted[source] = self.drafted.get(source, 0) + proposed
        self.drafts_accepted[source] = self.drafts_accepted.get(source, 0) + accepted

    def numbers(self) -> dict[str, int]:
        """All counters by name, as `status` shows them."""
        flat = {
            name: value
            for name in self.__slots__
            if name != "ends" and isinstance(value := getattr(self, name), int)
        }
        for prefix, counts in (
            ("ended", self.ended),
            ("drafted", self.drafted),
            ("drafts_accepted", self.drafts_accepted),
        ):
            flat |= {f"{prefix}_{name}": count for name, count in counts.items()}
        return flat


@dataclass(slots=True)
class PassReport:
    """Counts of one pass's work."""

    commands: int = 0
    admitted: int = 0
    stepped: bool = False
    tokens: int = 0
    ended: int = 0
