"""`burst`: users with think times, so that requests arrive while others are in every phase."""

from __future__ import annotations

import random

from zmqengine.bench.load.loops import thinking_users
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario


def cases(options: ScenarioOptions) -> list[str]:
    return [f"{options.burst_users} users x {options.burst_requests_per_user}"]


async def run(context: Context, case: str) -> Measures:
    """Run users with random think times, the same for every target."""
    options = context.options
    requests = [
        [
            context.prompts.request(options.prompt_tokens, options.max_tokens)
            for _ in range(options.burst_requests_per_user)
        ]
        for _ in range(options.burst_users)
    ]
    draw = random.Random(context.shared_seed)
    pauses_s = [[draw.uniform(0.0, options.burst_think_s_max) for _ in own] for own in requests]
    return summarise(context.records(await thinking_users(context.session, requests, pauses_s)))


SCENARIO = Scenario(
    name="burst",
    cases=cases,
    run=run,
    shown=("ttft_p50_ms", "ttft_p90_ms", "ttft_max_ms", "itl_max_ms", "tokens_per_s", "completed"),
)
