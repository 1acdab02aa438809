"""How big `bench overhead` is, and the cases that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Case(NamedTuple):
    """So many `requests` in a closed loop of `streams`, which `processes` clients share."""

    name: str
    streams: int
    processes: int
    requests: int
    max_tokens: int


class OverheadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the work; `processes` is how many clients share the largest number of streams, unless it is 1.

    `burst` requests come at once, in a case of their own; 0 leaves it out.
    """

    streams: tuple[int, ...] = (1, 8, 32)
    processes: int = 4
    prompt_tokens: int = 64
    max_tokens: int = 64
    requests_min: int = 16
    requests_per_stream: int = 8
    burst: int = 0
    burst_max_tokens: int = 16
    arrivals: int = 8
    idle_s: float = 10.0
    timeout_s: float = 120.0

    @property
    def cases(self) -> list[Case]:
        """By number of streams; the largest again, shared by several clients; the burst."""
        cases = [self.case(streams, 1) for streams in self.streams]
        if self.processes > 1:
            cases.append(self.case(max(self.streams), self.processes))
        if self.burst:
            cases.append(Case(f"{self.burst} at once", self.burst, 1, self.burst, self.burst_max_tokens))
        return cases

    def case(self, streams: int, processes: int) -> Case:
        """The case of so many streams."""
        name = f"{streams} stream{'s' if streams > 1 else ''}"
        if processes > 1:
            name += f", {processes} clients"
        count = max(self.requests_min, streams * self.requests_per_stream)
        return Case(name, streams, processes, count, self.max_tokens)
