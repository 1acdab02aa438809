"""`python -m benchmarks.saving`: decode speed lost while cached prompts are written to disk.

One engine, in one process and without a client. Each round prefills prompts of a given total size, then decodes rows
twice: once without saving, and once while the disk tier saves as in the worker, until all is on disk. The order of
the two alternates.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import click
import msgspec

from zmqengine.bench.arguments import with_settings
from zmqengine.bench.models.model_facts import model_directory, model_facts
from zmqengine.bench.reports import machine as this_machine
from zmqengine.bench.reports.report import BenchReport, Cell, TargetFacts
from zmqengine.cli.commands.bench import finish, out_option, ranges_option, seed_option, show_progress
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.options import EngineOptions
from zmqengine.worker.preparing.preparer import Preparer
from zmqengine.worker.preparing.prompt_disk import PromptDisk

Progress = Callable[[str], None]
ALONE, SAVING = "undisturbed", "while saving"
_SETTLE_STEPS = 20


class SavingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes. A round writes about `round_bytes` of prompts of `read_tokens`, in at least `steps_min` steps each way;
    decoding rows have prompts of `prompt_tokens`."""

    rows: int = 8
    prompt_tokens: int = 64
    round_bytes: int = 128 << 20
    read_tokens: int = 1024
    steps_min: int = 200


class SavingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Prompts are saved in a new directory in `directory`, or in the system's temporary one."""

    model: str = "pico"
    directory: str = ""
    options: SavingOptions = SavingOptions()
    rounds: int = 8
    seed: int = 0


class _Stretch(msgspec.Struct, frozen=True):
    tokens: int
    steps: int
    seconds: float
    written_bytes: int

    def cell(self, case: str, target: str, number: int) -> Cell:
        measures: dict[str, float] = {"tokens_per_s": self.tokens / self.seconds, "wall_s": self.seconds}
        if self.written_bytes:
            measures["written_bytes"] = self.written_bytes
        return Cell(scenario="saving", case=case, target=target, round=number, measures=measures)


def saving(plan: SavingPlan, on_progress: Progress) -> BenchReport:
    """Run the rounds. Nothing is left on disk."""
    setting = this_machine.setting()
    model = str(model_directory(plan.model))
    options = plan.options
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="zmqengine-bench-", dir=plan.directory or None) as directory:
        run = _Run(model, Path(directory), options, plan.seed)
        steps = options.steps_min
        try:
            for number in range(-1, plan.rounds):
                on_progress(f"saving: round {number + 1} of {plan.rounds}, reading prompts")
                run.read_prompts()
                found: dict[str, _Stretch] = {}
                for target in (ALONE, SAVING) if number % 2 else (SAVING, ALONE):
                    on_progress(f"saving: round {number + 1} of {plan.rounds}, {target}")
                    # New rows: longer ones are slower.
                    run.start_rows()
                    found[target] = run.save_all() if target == SAVING else run.decode(steps)
                    run.end_rows()
                    steps = max(options.steps_min, found[target].steps)
                # The first round warms up, and finds the number of steps of a round.
                if number >= 0:
                    case = f"{options.rows} rows, {options.round_bytes >> 20} MiB a round"
                    cells += [found[target].cell(case, target, number) for target in (ALONE, SAVING)]
        finally:
            run.close()
    return BenchReport(
        kind="saving",
        model=model_facts(plan.model),
        options={**msgspec.to_builtins(options), "rounds": plan.rounds, "seed": plan.seed},
        base=ALONE,
        targets=[TargetFacts(label=label, kind="engine", facts=run.facts) for label in (ALONE, SAVING)],
        cells=cells,
        **setting,
    )


class _Run:
    """An engine with a disk tier, and its decoding rows."""

    def __init__(self, model: str, directory: Path, options: SavingOptions, seed: int) -> None:
        from zmqengine.engine.open import open_mlx_engine

        self._options = options
        self._files = directory
        opened = open_mlx_engine(
            model,
            EngineOptions(
                rows_max=options.rows,
                cache_dir=str(directory),
                prompt_cache_bytes=2 * options.round_bytes,
                cache_dir_free_bytes=0,
                speculate="off",
            ),
        )
        self.facts = opened.facts
        self._engine = opened.engine
        assert opened.engine.disk is not None, "prompts of this model cannot be kept"
        self._tier = opened.engine.disk
        self._disk = PromptDisk(self._tier, Preparer(lambda: None))
        self._draw = random.Random(seed)
        self._ids = count(1)
        self._rows: list[int] = []
        self._prompt_bytes = 0

    def read_prompts(self) -> None:
        """Prefill the prompts that a round writes, and keep them in the prefix cache."""
        taken = 0
        while taken < self._options.round_bytes:
            self._engine.insert([self._request(self._options.read_tokens, 1)])
            while self._engine.stats().rows_prefilling or self._engine.stats().rows_decoding:
                self._engine.next()
            # All are as long as the first, for which nothing had to be evicted.
            self._prompt_bytes = self._prompt_bytes or self._engine.memory().prompt_cache
            taken += self._prompt_bytes

    def start_rows(self) -> None:
        """Start rows that decode until `end_rows`."""
        requests = [self._request(self._options.prompt_tokens, 1 << 20) for _ in range(self._options.rows)]
        self._rows = [request.row for request in requests]
        self._engine.insert(requests)
        while self._engine.stats().rows_prefilling:
            self._engine.next()
        self.decode(_SETTLE_STEPS)

    def end_rows(self) -> None:
        """Remove the rows."""
        self._engine.remove(self._rows)

    def decode(self, steps: int) -> _Stretch:
        """Decode for this number of steps."""
        return self._stretch(lambda done: done < steps, lambda step_s: None)

    def save_all(self) -> _Stretch:
        """Decode, saving after each step as the worker does, until all prompts are on disk."""
        before = self._written()
        stretch = self._stretch(
            lambda done: done < self._options.steps_min or self._is_saving,
            self._disk.save,
        )
        return msgspec.structs.replace(stretch, written_bytes=self._written() - before)

    @property
    def _is_saving(self) -> bool:
        return self._disk.has_work or bool(self._tier.numbers()["waiting_bytes"])

    def close(self) -> None:
        """End the engine and the thread that writes."""
        self._tier.close(seconds=10.0)  # Or the writer still writes into the directory that is removed next.
        self._engine.close()

    def _stretch(self, goes_on: Callable[[int], bool], after: Callable[[float], None]) -> _Stretch:
        tokens = steps = 0
        started_s = time.perf_counter()
        while goes_on(steps):
            step_s = time.perf_counter()
            tokens += len(self._engine.next().tokens)
            after(time.perf_counter() - step_s)
            steps += 1
        return _Stretch(tokens, steps, time.perf_counter() - started_s, 0)

    def _request(self, tokens: int, max_tokens: int) -> RowRequest:
        prompt = [self._draw.randrange(1, self._engine.info.vocab_size) for _ in range(tokens)]
        return RowRequest(next(self._ids), prompt, max_tokens)

    def _written(self) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self._files / "prompts") if entry.is_file())


@click.command()
@click.option("--model", default="pico", show_default=True, help="pico or a directory.")
@click.option(
    "--dir", "directory", default="", help="On the disk to be measured. [default: the temporary one]"
)
@click.option("--rounds", default=8, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=JSON", help="A size: rows=32.")
@seed_option
@out_option
@ranges_option
def main(settings: tuple[str, ...], out: Path | None, ranges: bool, **others: Any) -> None:
    """Measure decode speed while prompts are written to disk: 1 GB in all."""
    plan = SavingPlan(options=with_settings(SavingOptions(), settings), **others)
    finish(saving(plan, show_progress), out, None, ranges)


if __name__ == "__main__":
    main()
