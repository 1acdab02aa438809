"""Figures computed from arrivals of tokens.

Definitions. *TTFT*: from just before the request is sent to the arrival of its first token. *ITL*, inter-token
latency: the time between the arrivals of neighbouring tokens of one stream; tokens that were read together
arrived together, so all but the first of them have a gap of 0. *TPOT*: (last - first token) / (tokens - 1) of
one stream, which grouping does not change. *End to end*: from sending to the end of the answer. Tokens per
second count what arrived, over the time from the first request sent to the last answer ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy

from zmqengine.bench.targets.records import RequestRecord

Measures = dict[str, float]
"""Figures by name; the end of a name is its unit. Figures that could not be measured are absent."""

PERCENTILES = (50, 90, 99)


class MeasureKind(msgspec.Struct, frozen=True):
    """Presentation of a measure: its heading, the better direction ("" for neither), and whether ratios make sense.

    They do for rates, times and sizes, not for counts.
    """

    heading: str
    better: Literal["higher", "lower", ""]
    is_rate: bool = True


def summarise(records: Sequence[RequestRecord]) -> Measures:
    """Figures of requests that ran together. TTFT and latencies include requests that were cut short."""
    if not records:
        return {}
    wall_s = max(record.ended_s for record in records) - min(record.started_s for record in records)
    tokens = sum(record.tokens for record in records)
    arrivals = sum(len(record.arrivals) for record in records)
    measures: Measures = {
        "requests": len(records),
        "completed": sum(record.completed for record in records),
        "errors": sum(bool(record.error) for record in records),
        "tokens": tokens,
        "wall_s": wall_s,
    }
    if wall_s > 0:
        measures["tokens_per_s"] = tokens / wall_s
        measures["prompt_tokens_per_s"] = sum(record.prompt_tokens for record in records) / wall_s
    if arrivals:
        measures["tokens_per_chunk"] = tokens / arrivals
    measures |= spread("ttft", [ttft_ms(record) for record in records])
    measures |= spread("itl", [gap for record in records for gap in token_gaps_ms(record)])
    measures |= spread("tpot", [tpot_ms(record) for record in records])
    measures |= spread("e2e", [end_to_end_ms(record) for record in records if record.completed])
    cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
    if cached:
        measures["cached_tokens"] = sum(cached)
    return measures


def spread(name: str, values_ms: Sequence[float | None]) -> Measures:
    """Percentiles, minimum and maximum, as `name_p50_ms` and so on; empty without values."""
    known = [value for value in values_ms if value is not None]
    if not known:
        return {}
    percentiles = numpy.percentile(known, PERCENTILES)
    measures = {
        f"{name}_p{percent}_ms": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)
    }
    return {f"{name}_min_ms": min(known), **measures, f"{name}_max_ms": max(known)}


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to the first token, None if none arrived."""
    first_s = record.first_token_s
    return None if first_s is None else (first_s - record.started_s) * 1000


def token_gaps_ms(record: RequestRecord) -> list[float]:
    """The tokens - 1 gaps between neighbouring tokens."""
    gaps: list[float] = []
    last_s: float | None = None
    for at_s, tokens in record.arrivals:
        if not tokens:
            continue
        if last_s is not None:
            gaps.append((at_s - last_s) * 1000)
        gaps.extend([0.0] * (tokens - 1))
        last_s = at_s
    return gaps


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time per token after the first, None for less than two tokens."""
    gaps = token_gaps_ms(record)
    return sum(gaps) / len(gaps) if gaps else None


def end_to_end_ms(record: RequestRecord) -> float:
    """The time from sending to the end of the answer."""
    return (record.ended_s - record.started_s) * 1000


def longest_silence_ms(record: RequestRecord, from_s: float, to_s: float) -> float | None:
    """The longest gap between arrivals that overlaps the window; None for fewer than two arrivals."""
    times = [arrival.at_s for arrival in record.arrivals if arrival.tokens]
    gaps = [
        (later - earlier) * 1000 for earlier, later in pairwise(times) if later > from_s and earlier < to_s
    ]
    return max(gaps, default=None)


_KINDS: dict[str, MeasureKind] = {
    "tokens_per_s": MeasureKind("tokens/s", "higher"),
    "prompt_tokens_per_s": MeasureKind("prompt tokens/s", "higher"),
    "first_tokens_per_s": MeasureKind("tokens/s, first minute", "higher"),
    "speedup": MeasureKind("in turn / together", "higher"),
    "pass_outside_us_p50": MeasureKind("pass outside next(), p50 (us)", "lower"),
    "pass_outside_us_p99": MeasureKind("pass outside next(), p99 (us)", "lower"),
    "pass_ms_p50": MeasureKind("pass, p50 (ms)", "lower"),
    "pass_ms_max": MeasureKind("pass, max (ms)", "lower"),
    "admission_wait_passes_max": MeasureKind("passes from arrival to prefill, max", "lower", is_rate=False),
    "silence_max_ms": MeasureKind("longest silence of a stream (ms)", "lower"),
    "ttft_long_ms": MeasureKind("TTFT of the long prompt (ms)", "lower"),
    "ttft_next_ms": MeasureKind("TTFT of the next request (ms)", "lower"),
    "cpu_after_left_cores": MeasureKind("server CPU after they left (cores)", "lower", is_rate=False),
    "idle_cpu_percent": MeasureKind("server CPU (% of a core)", "lower", is_rate=False),
    "client_cpu_cores": MeasureKind("client CPU (cores)", "", is_rate=False),
    "tokens_per_chunk": MeasureKind("tokens a chunk", "", is_rate=False),
    "completed": MeasureKind("completed", "higher", is_rate=False),
    "survivors_complete": MeasureKind("survivors complete", "higher", is_rate=False),
    "hindered_complete": MeasureKind("slow and stopped ones complete", "higher", is_rate=False),
    "jain": MeasureKind("Jain's index of those who wait", "higher", is_rate=False),
    "reread_tokens": MeasureKind("tokens read again", "lower", is_rate=False),
    "waiting_max": MeasureKind("waiting at once, max", "lower", is_rate=False),
    "estimate_to_wait": MeasureKind("estimate / wait, p50", "", is_rate=False),
    "aged_starts": MeasureKind("starts by ageing", "", is_rate=False),
    "full_tokens_per_s": MeasureKind("tokens/s while all streams run", "higher"),
    "steps_per_token": MeasureKind("steps a token of a stream", "lower"),
    "accepted_share": MeasureKind("accepted of what was drafted", "higher", is_rate=False),
    "cached_tokens": MeasureKind("cached tokens", "higher", is_rate=False),
    **{
        name: MeasureKind(name.replace("_", " "), "", is_rate=False)
        for name in ("requests", "hindered_requests", "tokens", "prompt_tokens", "passes")
    },
}
_WORDS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "cpu": "CPU"}
_UNITS = ("ms", "us", "s", "bytes", "cores", "percent")


def kind_of(name: str) -> MeasureKind:
    """The presentation of the measure of this name. Names not listed are times, sizes or counts of failures."""
    if name in _KINDS:
        return _KINDS[name]
    *words, last = name.split("_")
    text = " ".join(_WORDS.get(word, word) for word in words)
    if last in _UNITS:
        return MeasureKind(f"{text} ({last})", "lower")
    return MeasureKind(f"{text} {last}".strip(), "lower", is_rate=False)
