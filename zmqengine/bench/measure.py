"""One scenario's case, once, against one target, with what it cost the server and us."""

from __future__ import annotations

import os
import time

from zmqengine.bench.measures import Measures
from zmqengine.bench.scenarios import Context, Scenario
from zmqengine.bench.worker_numbers import WorkerNumbers, figures


async def measure(context: Context, scenario: Scenario, case: str) -> Measures:
    """The scenario's own figures; processor time and memory of the server; processor time of the load."""
    numbers = WorkerNumbers(context.target.worker) if context.target.worker else None
    try:
        passes_before = await numbers.read() if numbers else {}
        server_before_s, load_before_s, started_s = context.usage.cpu_s(), _own_cpu_s(), time.perf_counter()
        measures = await scenario.run(context, case)
        elapsed_s = time.perf_counter() - started_s
        server_after_s = context.usage.cpu_s()
        measures = {"client_cpu_cores": (_own_cpu_s() - load_before_s) / elapsed_s, **measures}
        if server_before_s is not None and server_after_s is not None:
            server_s = server_after_s - server_before_s
            measures["server_cpu_cores"] = server_s / elapsed_s
            if measures.get("tokens"):
                measures["server_cpu_per_token_us"] = server_s * 1e6 / measures["tokens"]
        memory = context.usage.memory_bytes()
        if memory is not None:
            measures["server_memory_bytes"] = memory
        if numbers:
            measures |= figures(passes_before, await numbers.read())
        return measures
    finally:
        if numbers:
            await numbers.close()


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
