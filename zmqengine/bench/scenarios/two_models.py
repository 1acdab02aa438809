"""`two-models`: two servers concurrently against one after the other. Above 1, sharing the machine pays."""

from __future__ import annotations

import asyncio
import time

from zmqengine.bench.load.loops import closed_loop
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.records import RequestSpec
from zmqengine.bench.targets.target import TargetError, TargetOutcome


def cases(options: ScenarioOptions) -> list[str]:
    return [f"{options.two_models_users} users each"]


async def run(context: Context, case: str) -> Measures:
    """Run one, then the other, then both, with the same amount of work each time."""
    if context.partner is None:
        raise TargetError("two-models needs two targets")
    pair = (context, context.partner)
    started_s = time.perf_counter()
    for one in pair:
        await _work(one)
    in_turn_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    both = await asyncio.gather(*(_work(one) for one in pair))
    together_s = time.perf_counter() - started_s
    measures = summarise(
        [record for one, outcomes in zip(pair, both, strict=True) for record in one.records(outcomes)]
    )
    return measures | {"in_turn_s": in_turn_s, "together_s": together_s, "speedup": in_turn_s / together_s}


async def _work(context: Context) -> list[TargetOutcome]:
    users = context.options.two_models_users
    return await closed_loop(context.session, _requests(context, users), users)


def _requests(context: Context, users: int) -> list[RequestSpec]:
    options = context.options
    count = max(options.requests_min, users * options.requests_per_user)
    return [context.prompts.request(options.prompt_tokens, options.max_tokens) for _ in range(count)]


SCENARIO = Scenario(
    name="two-models",
    cases=cases,
    run=run,
    shown=("speedup", "in_turn_s", "together_s", "tokens_per_s"),
    pairs=True,
)
