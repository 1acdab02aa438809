"""`users`: a closed loop of concurrent users, each waiting for its answer."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.bench.load.load_process import LoadJob
from zmqengine.bench.load.loops import closed_loop
from zmqengine.bench.load.measures import Measures, summarise
from zmqengine.bench.load.processes import run_together
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.records import RequestSpec


def cases(options: ScenarioOptions) -> list[str]:
    """One case for each number of users."""
    return [str(users) for users in options.users]


async def run(context: Context, case: str) -> Measures:
    """Run all requests, `users` at a time."""
    options, users = context.options, int(case)
    count = max(options.requests_min, users * options.requests_per_user)
    requests = [context.prompts.request(options.prompt_tokens, options.max_tokens) for _ in range(count)]
    processes = min(options.load_processes, users)
    if processes == 1:
        return summarise(context.records(await closed_loop(context.session, requests, users)))
    jobs = split(context, requests, users, processes)
    results = await run_together(jobs)
    return summarise(context.noted([record for result in results for record in result.records]))


def split(context: Context, requests: Sequence[RequestSpec], users: int, processes: int) -> list[LoadJob]:
    """The work divided evenly among load processes."""
    return [
        LoadJob(
            target=context.target,
            requests=list(requests[number::processes]),
            users=len(range(number, users, processes)),
            timeout_s=context.options.timeout_s,
        )
        for number in range(processes)
    ]


SCENARIO = Scenario(
    name="users",
    cases=cases,
    run=run,
    shown=("tokens_per_s", "ttft_p50_ms", "ttft_max_ms", "itl_p50_ms", "itl_p99_ms", "completed"),
)
