"""`front-ends`: 1 to 64 client processes, some of them slow or suspended for a while."""

from __future__ import annotations

from zmqengine.bench.load.load_process import LoadJob
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.load.processes import run_together
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario

HINDERED = " hindered"


def cases(options: ScenarioOptions) -> list[str]:
    """Cases by number of processes; the largest of at least 4 again, with slow and suspended ones beside them."""
    beside = min((n for n in options.front_ends if n >= 4), default=max(options.front_ends))
    hindered = options.front_ends_slow + options.front_ends_stalled
    plain = [str(number) for number in options.front_ends]
    return [*plain, f"{beside} + {hindered}{HINDERED}"] if hindered else plain


async def run(context: Context, case: str) -> Measures:
    """Run one user per process. Figures are of healthy processes; of the others, whether their answers are complete."""
    options = context.options
    healthy = int(case.split()[0])
    slow = options.front_ends_slow if case.endswith(HINDERED) else 0
    stalled = options.front_ends_stalled if case.endswith(HINDERED) else 0
    results = await run_together(
        [_job(context) for _ in range(healthy + slow + stalled)],
        slow=range(healthy, healthy + slow),
        stalled=range(healthy + slow, healthy + slow + stalled),
        stall_s=options.stall_s,
    )
    measures = summarise(context.noted([r for result in results[:healthy] for r in result.records]))
    hindered = [record for result in results[healthy:] for record in result.records]
    if hindered:
        whole = sum(record.completed and record.tokens == options.max_tokens for record in hindered)
        measures["hindered_requests"] = len(hindered)
        measures["hindered_complete"] = whole
    return measures


def _job(context: Context) -> LoadJob:
    options = context.options
    requests = [
        context.prompts.request(options.prompt_tokens, options.max_tokens)
        for _ in range(options.front_end_requests)
    ]
    return LoadJob(target=context.target, requests=requests, users=1, timeout_s=options.timeout_s)


SCENARIO = Scenario(
    name="front-ends",
    cases=cases,
    run=run,
    shown=("tokens_per_s", "ttft_p50_ms", "ttft_max_ms", "itl_p99_ms", "completed", "hindered_complete"),
)
