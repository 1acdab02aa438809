"""`cancel`: half of the streams of a full server are cancelled; then clients of non-streamed answers disconnect.

The server must run exactly `slots` requests at a time, or there is no slot to wait for: then only the second half
is measured.
"""

from __future__ import annotations

import asyncio
import time

import numpy

from zmqengine.bench.load.loops import collector_off, outcomes_of, streams_in_flight
from zmqengine.bench.load.measures import Measures, summarise, ttft_ms
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario

QUEUE_S = 0.05
SETTLE_S = 0.3


def cases(options: ScenarioOptions) -> list[str]:
    """Two cases: streams cancelled; non-streamed requests disconnected."""
    return [f"half of {options.slots} streams", f"{options.slots} not streaming"]


async def run(context: Context, case: str) -> Measures:
    """Run one of the two cases."""
    return await (_leave_half(context) if case.startswith("half") else _leave_unstreamed(context))


async def _leave_half(context: Context) -> Measures:
    options, session, prompts = context.options, context.session, context.prompts
    long = [prompts.request(options.prompt_tokens, options.cancel_max_tokens) for _ in range(options.slots)]
    short = [prompts.request(options.prompt_tokens, 4) for _ in range(options.slots // 2)]
    with collector_off():
        streams = [session.send(request) for request in long]
        await asyncio.gather(*(stream.wait_chunks(2) for stream in streams))
        queued = [session.send(request) for request in short]
        await asyncio.sleep(QUEUE_S)
        left_s = time.perf_counter()
        for stream in streams[: options.slots // 2]:
            stream.cancel()
        waiting = context.records(await outcomes_of(queued))
        records = context.records(await outcomes_of(streams))
    measures = summarise(records + waiting)
    kept = records[options.slots // 2 :]
    measures["survivors_complete"] = sum(r.completed and r.tokens == options.cancel_max_tokens for r in kept)
    freed = [r.first_token_s - left_s for r in waiting if r.first_token_s is not None]
    if freed and min(freed) >= 0:
        measures["slot_free_p50_ms"] = float(numpy.median(freed)) * 1000
        measures["slot_free_max_ms"] = max(freed) * 1000
    return measures


async def _leave_unstreamed(context: Context) -> Measures:
    options, prompts, usage = context.options, context.prompts, context.usage
    requests = [
        prompts.request(options.prompt_tokens, options.cancel_max_tokens, stream=False)
        for _ in range(options.slots)
    ]
    async with streams_in_flight(context.session, requests):
        await asyncio.sleep(SETTLE_S)
    await asyncio.sleep(SETTLE_S)
    before_s, cpu_before_s = time.perf_counter(), usage.cpu_s()
    await asyncio.sleep(options.cancel_watch_s)
    after_s, cpu_after_s = time.perf_counter(), usage.cpu_s()
    after = context.session.send(prompts.request(options.prompt_tokens, 4))
    record = context.records([await after.outcome()])[0]
    measures: Measures = {"completed": int(record.completed), "errors": int(bool(record.error))}
    if cpu_before_s is not None and cpu_after_s is not None:
        measures["cpu_after_left_cores"] = (cpu_after_s - cpu_before_s) / (after_s - before_s)
    next_ms = ttft_ms(record)
    if next_ms is not None:
        measures["ttft_next_ms"] = next_ms
    return measures


SCENARIO = Scenario(
    name="cancel",
    cases=cases,
    run=run,
    shown=(
        "slot_free_p50_ms",
        "slot_free_max_ms",
        "survivors_complete",
        "cpu_after_left_cores",
        "ttft_next_ms",
    ),
)
