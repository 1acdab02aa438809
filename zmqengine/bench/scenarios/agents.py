"""`agents`: conversations of many turns, each prompt extending the previous one."""

from __future__ import annotations

import asyncio

from zmqengine.bench.load.loops import collector_off
from zmqengine.bench.load.measures import Measures, spread, summarise, ttft_ms
from zmqengine.bench.load.prompts import Prompts
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.scenarios.long_context import Context, Scenario
from zmqengine.bench.targets.records import RequestRecord, RequestSpec


def cases(options: ScenarioOptions) -> list[str]:
    return [f"{options.agents} agents x {options.agent_turns} turns"]


async def run(context: Context, case: str) -> Measures:
    """Run agents side by side; first turns are reported apart from later ones, which can hit the prefix cache."""
    options = context.options

    async def one_agent(number: int) -> list[RequestRecord]:
        prompts = context.prompts.reseeded(f"{context.seed} agent {number}")
        request = prompts.request(options.agent_turn_tokens, options.agent_max_tokens)
        records = []
        for _ in range(options.agent_turns):
            record = context.records([await context.session.send(request).outcome()])[0]
            records.append(record)
            request = _next_turn(request, record, prompts, options)
        return records

    with collector_off():
        agents = await asyncio.gather(*(one_agent(number) for number in range(options.agents)))
    measures = summarise([record for records in agents for record in records])
    measures |= spread("ttft_first", [ttft_ms(records[0]) for records in agents])
    return measures | spread("ttft_later", [ttft_ms(record) for records in agents for record in records[1:]])


def _next_turn(
    request: RequestSpec, record: RequestRecord, prompts: Prompts, options: ScenarioOptions
) -> RequestSpec:
    more = prompts.request(options.agent_turn_tokens, options.agent_max_tokens)
    return RequestSpec(
        text=request.text + record.text + more.text,
        prompt_ids=request.prompt_ids + record.output_ids + more.prompt_ids if request.prompt_ids else [],
        max_tokens=options.agent_max_tokens,
    )


SCENARIO = Scenario(
    name="agents",
    cases=cases,
    run=run,
    shown=("ttft_first_p50_ms", "ttft_later_p50_ms", "ttft_later_max_ms", "wall_s", "cached_tokens"),
)
