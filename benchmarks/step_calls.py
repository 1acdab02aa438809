"""`python -m benchmarks.step_calls [MODEL]`: calls of this project's Python functions in a steady greedy decode step.

The engine is that of a worker on this machine, with its options but without drafts. The figure says where a step's time
on the host may go; it is no bound, since code that is cut to one reads worse and seldom runs faster.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import click

import zmqengine
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.options import EngineOptions

OURS = str(Path(zmqengine.__file__).parent)
ROWS = (1, 8, 32)
STEPS, WARM_UP_STEPS = 32, 40


@click.command()
@click.argument("model", default="pico")
@click.option("--functions", default=20, show_default=True, help="Functions to list, the most called first.")
def main(model: str, functions: int) -> None:
    """Print the calls a step of 1, 8 and 32 rows, and the functions that are called most."""
    # MLX is imported with it, and the engine sets its environment first.
    from zmqengine.engine.open import open_mlx_engine
    from zmqengine.pico import BUNDLED, model_path

    directory = str(model_path(model)) if model in BUNDLED else model
    engine = open_mlx_engine(directory, EngineOptions(warm_up_s=0, speculate="off")).engine
    for rows in ROWS:
        requests = [
            RowRequest(row, [1 + row, 2, 3], WARM_UP_STEPS + STEPS + 8, stop_token_ids=frozenset())
            for row in range(rows)
        ]
        if failures := engine.insert(requests):
            raise click.ClickException(f"{len(failures)} rows did not start")
        for _ in range(WARM_UP_STEPS):
            engine.next()
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, argument: object, calls: Counter[str] = calls) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(OURS):
                calls[f"{code.co_filename[len(OURS) + 1 :]}:{code.co_name}"] += 1

        sys.setprofile(count)
        tokens = sum(len(engine.next().tokens) for _ in range(STEPS))
        sys.setprofile(None)
        print(f"{rows} rows: {calls.total() / STEPS:.0f} calls a step, {tokens / STEPS:.1f} tokens")
        for name, number in calls.most_common(functions):
            print(f"  {number / STEPS:6.2f} {name}")
        engine.remove(list(range(rows)))
    engine.close()


if __name__ == "__main__":
    main()
