"""Chats of unlike users through a worker, and through `mlx_lm.server`: README's table, for a few seconds each and with
shorter prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from zmqengine.bench.device.driving import as_on_metal, measured_model
from zmqengine.bench.device.verdict import Verdict
from zmqengine.bench.options import ScenarioOptions
from zmqengine.bench.serve import ServePlan, serve
from zmqengine.bench.servers.started import StartPlan
from zmqengine.bench.targets.target import TargetError

USERS = (1, 4, 8)
SECONDS = 7.0
_MEASURES = {"tokens_per_s": "tokens/s", "ttft_p99_ms": "ms TTFT p99", "silence_max_ms": "ms longest silence"}


def check(directory: Path) -> Iterator[Verdict]:
    """Tokens a second, times to the first token and silences, by number of users."""
    model = str(measured_model(directory))
    # The warm-up is measured by nobody here, and may take longer than the rest.
    worker = StartPlan(model=model, options={"warm_up_s": 5.0, **as_on_metal()})
    for plan in (worker, StartPlan(model=model, worker=False, mlx_lm=True)):
        yield from _talk(plan)


def _talk(start: StartPlan) -> Iterator[Verdict]:
    # Shorter prompts than in README: all users begin at once, and the seconds are for answers.
    options = ScenarioOptions(
        chat_users=USERS,
        chat_minutes=1,
        chat_minute_s=SECONDS,
        chat_shared_tokens=100,
        chat_prompt_tokens_median=120,
        chat_prompt_tokens_max=800,
    )
    plan = ServePlan(scenarios=("chat",), start=start, options=options, rounds=1)
    try:
        report = asyncio.run(serve(plan, lambda text: None))
    except TargetError as error:
        yield Verdict("mlx_lm.server" if start.mlx_lm else "zmqengine", None, str(error)[:300])
        return
    for cell in report.cells:
        figures = {name: cell.measures[name] for name in _MEASURES if name in cell.measures}
        text = ", ".join(
            f"{figures[name]:.4g} {words}" for name, words in _MEASURES.items() if name in figures
        )
        yield Verdict(f"{cell.case} users, {cell.target}", None, text or cell.error[:300], figures)
