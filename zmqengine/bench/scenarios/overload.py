"""`overload`: far more requests at once than the server can run, each of which should be answered."""

from __future__ import annotations

from zmqengine.bench.load.loops import open_loop
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario


def cases(options: ScenarioOptions) -> list[str]:
    return [f"{options.overload_requests} at once"]


async def run(context: Context, case: str) -> Measures:
    """Send all requests at once, each on its own connection."""
    options = context.options
    requests = [
        context.prompts.request(options.prompt_tokens, options.overload_max_tokens)
        for _ in range(options.overload_requests)
    ]
    outcomes = await open_loop(context.session, requests, [0.0] * len(requests))
    return summarise(context.records(outcomes))


SCENARIO = Scenario(
    name="overload",
    cases=cases,
    run=run,
    shown=("completed", "wall_s", "ttft_p50_ms", "ttft_max_ms", "tokens_per_s"),
)
