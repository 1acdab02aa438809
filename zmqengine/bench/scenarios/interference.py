"""`interference`: gaps in decoding streams while a long prompt is prefilled."""

from __future__ import annotations

import asyncio

import numpy

from zmqengine.bench.load.loops import collector_off, outcomes_of
from zmqengine.bench.load.measures import Measures, longest_silence_ms, token_gaps_ms, ttft_ms
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.records import RequestRecord
from zmqengine.bench.targets.target import TargetError


def cases(options: ScenarioOptions) -> list[str]:
    return [f"{options.interference_prompt_tokens}-token prompt, {options.interference_streams} streams"]


async def run(context: Context, case: str) -> Measures:
    """Start decoding streams, run the long request, then cancel the streams."""
    options, session, prompts = context.options, context.session, context.prompts
    short = [
        prompts.request(options.prompt_tokens, options.interference_stream_tokens)
        for _ in range(options.interference_streams)
    ]
    long = prompts.request(options.interference_prompt_tokens, options.prefix_max_tokens)
    with collector_off():
        streams = [session.send(request) for request in short]
        warm = await asyncio.gather(*(s.wait_chunks(options.interference_warm_chunks) for s in streams))
        outcome = await session.send(long).outcome() if all(warm) else None
        for stream in streams:
            stream.cancel()
        outcomes = await outcomes_of(streams)
    if outcome is None:
        raise TargetError(f"{context.target.label}: a stream ended before the long prompt could be sent")
    return figures(context.records(outcomes), context.records([outcome])[0])


def figures(streams: list[RequestRecord], long: RequestRecord) -> Measures:
    """Gaps of the decoding streams before the long request, and during its prefill."""
    before = [gap for record in streams for gap in token_gaps_ms(_until(record, long.started_s))]
    first_s = long.first_token_s
    silences = [
        silence
        for record in streams
        if (silence := longest_silence_ms(record, long.started_s, first_s or long.ended_s)) is not None
    ]
    measures: Measures = {
        "requests": len(streams) + 1,
        "errors": sum(bool(record.error) for record in [*streams, long]),
        "completed": int(long.completed),
        "prompt_tokens": long.prompt_tokens,
    }
    if before:
        measures["itl_before_p50_ms"] = float(numpy.median(before))
    if silences:
        measures["silence_max_ms"] = max(silences)
    long_ttft_ms = ttft_ms(long)
    if long_ttft_ms is not None:
        measures["ttft_long_ms"] = long_ttft_ms
    return measures


def _until(record: RequestRecord, at_s: float) -> RequestRecord:
    arrivals = [arrival for arrival in record.arrivals if arrival.at_s <= at_s]
    return RequestRecord(started_s=record.started_s, ended_s=at_s, arrivals=arrivals)


SCENARIO = Scenario(
    name="interference",
    cases=cases,
    run=run,
    shown=("silence_max_ms", "ttft_long_ms", "itl_before_p50_ms"),
)
