"""`chat`: people who talk, ask again and again, and are all unlike: prompts, answers and pauses of random lengths."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence

from zmqengine.bench.load.loops import collector_off, outcomes_of
from zmqengine.bench.load.measures import Measures, longest_silence_ms, spread, token_gaps_ms, ttft_ms
from zmqengine.bench.load.prompts import Prompts
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.target import TargetStream


def cases(options: ScenarioOptions) -> list[str]:
    """One case for each number of users; the first has the first minute after a server is ready."""
    return [str(users) for users in options.chat_users]


async def run(context: Context, case: str) -> Measures:
    """All users talk for some minutes; the measures are those of the last, `first_` those of the first."""
    options, users = context.options, int(case)
    minute_s, until_s = options.chat_minute_s, options.chat_minutes * options.chat_minute_s
    shared = context.prompts.text(options.chat_shared_tokens)
    streams: list[TargetStream] = []

    async def one_user(number: int) -> None:
        chance = random.Random(f"{context.shared_seed} {number}")
        prompts = context.prompts.reseeded(f"{context.seed} {number}")
        requests = conversation(options, chance, prompts, shared)
        while True:
            # Tokenising takes milliseconds, which are not the server's: on a thread, while the user thinks.
            request = await asyncio.to_thread(next, requests)
            await asyncio.sleep(chance.uniform(0, options.chat_think_s_max))
            streams.append(context.session.send(request))
            await streams[-1].outcome()

    with collector_off():
        start_s = context.session.clock()
        talking = [asyncio.ensure_future(one_user(number)) for number in range(users)]
        done, _ = await asyncio.wait(talking, timeout=until_s, return_when="FIRST_EXCEPTION")
        for stream in streams:
            stream.cancel()
        for task in talking:
            task.cancel()
        outcomes = await outcomes_of(streams)
    for task in done:
        task.result()
    records = context.records(outcomes)
    minutes = [
        within(records, start_s + minute * minute_s, start_s + (minute + 1) * minute_s)
        for minute in range(options.chat_minutes)
    ]
    first = {f"first_{name}": figure for name, figure in minutes[0].items()}
    return {"errors": sum(bool(record.error) for record in records), **minutes[-1], **first}


def conversation(
    options: ScenarioOptions, chance: random.Random, prompts: Prompts, shared: str
) -> Iterator[RequestSpec]:
    """Requests of one user without end: log-normal prompts behind the shared beginning, uniform answers."""
    while True:
        length = chance.lognormvariate(
            math.log(options.chat_prompt_tokens_median), options.chat_prompt_tokens_sigma
        )
        prompt_tokens = max(1, min(options.chat_prompt_tokens_max, round(length)))
        text = shared + prompts.text(prompt_tokens)
        yield prompts.request_of(
            text,
            chance.randint(*options.chat_answer_tokens),
            temperature=chance.choice(options.chat_temperatures),
            top_p=options.chat_top_p,
        )


def within(records: Sequence[RequestRecord], from_s: float, to_s: float) -> Measures:
    """Tokens that arrived between two times of the clock; first tokens and gaps of requests that were sent there."""
    tokens = sum(
        arrival.tokens for record in records for arrival in record.arrivals if from_s <= arrival.at_s < to_s
    )
    sent = [record for record in records if from_s <= record.started_s < to_s]
    silences = [longest_silence_ms(record, from_s, to_s) for record in records]
    return {
        "tokens_per_s": tokens / (to_s - from_s),
        "requests": len(sent),
        **spread("ttft", [ttft_ms(record) for record in sent]),
        **spread("itl", [gap for record in sent for gap in token_gaps_ms(record)]),
        "silence_max_ms": max((silence for silence in silences if silence is not None), default=0.0),
    }


SCENARIO = Scenario(
    name="chat",
    cases=cases,
    run=run,
    shown=(
        "first_tokens_per_s",
        "tokens_per_s",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "silence_max_ms",
    ),
)
