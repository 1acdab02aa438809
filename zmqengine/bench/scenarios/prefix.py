"""`prefix`: one long prompt repeated, and requests with a long shared prefix, in sequence and concurrently."""

from __future__ import annotations

from zmqengine.bench.load.loops import closed_loop
from zmqengine.bench.load.measures import Measures, spread, summarise, ttft_ms
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario

SAME, IN_TURN, TOGETHER = "the same", "in turn", "together"
SUFFIX_TOKENS = 16


def cases(options: ScenarioOptions) -> list[str]:
    """Cases: one prompt in sequence; new suffixes in sequence and concurrently."""
    return [SAME, IN_TURN, TOGETHER]


async def run(context: Context, case: str) -> Measures:
    """Use a new prefix; each request adds some tokens, its own or common ones."""
    options, prompts = context.options, context.prompts
    prefix = prompts.text(options.prefix_tokens)
    requests = [
        prompts.request(SUFFIX_TOKENS, options.prefix_max_tokens, prefix=prefix)
        for _ in range(options.prefix_requests)
    ]
    if case == SAME:
        requests = requests[:1] * len(requests)
    users = len(requests) if case == TOGETHER else 1
    records = context.records(await closed_loop(context.session, requests, users))
    measures = summarise(records)
    if case != TOGETHER:
        measures |= _named(ttft_ms(records[0]), "ttft_first_ms")
        measures |= spread("ttft_later", [ttft_ms(record) for record in records[1:]])
    return measures


def _named(value_ms: float | None, name: str) -> Measures:
    return {} if value_ms is None else {name: value_ms}


SCENARIO = Scenario(
    name="prefix",
    cases=cases,
    run=run,
    shown=("ttft_first_ms", "ttft_later_p50_ms", "ttft_p50_ms", "ttft_max_ms", "wall_s", "cached_tokens"),
)
