"""Runs engines in tests, and says what plain mlx-lm would have made."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import ModelInfo, RowDraft, RowFailure, RowPrefill, RowRequest, RowToken
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.load.probe import open_runner
from zmqengine.engine.models.mlx_lm_runner import MlxLmRunner
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.open import find_device, find_ops
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine

STEPS_MAX = 2000
T = TypeVar("T")


class Run:
    """What came out of an engine."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[RowToken]] = {}
        self.prefills: list[RowPrefill] = []
        self.failures: list[RowFailure] = []
        self.drafts: list[RowDraft] = []

    def ids(self, row: int) -> list[int]:
        return [token.token for token in self.tokens.get(row, [])]

    def finish(self, row: int) -> str | None:
        return self.tokens[row][-1].finish

    def ended(self, row: int) -> bool:
        return row in self.tokens and self.finish(row) is not None

    def cached(self, row: int) -> int:
        return [prefill.cached for prefill in self.prefills if prefill.row == row][-1]


_known: dict[tuple[int, Hashable], tuple[weakref.ref[Any], Any]] = {}


def once(model: Any, what: Hashable, find_out: Callable[[], T]) -> T:
    """`what` about a model, which does not change: found out when it is asked for first, and known to later tests."""
    known = _known.get((id(model), what))
    if known is None or known[0]() is not model:
        known = _known[id(model), what] = weakref.ref(model), find_out()
    return cast(T, known[1])


def make_engine(model: Any, *, context_tokens: int = 2048, **options: Any) -> MlxEngine:
    """An engine on a model of tests.support.models, as a worker runs it on this device."""
    options.setdefault("device", find_device())
    info = ModelInfo("test", VOCAB_SIZE, context_tokens, frozenset(), 0)
    given = engine_options(options)
    # A test may give a runner of its own.
    runner = model if hasattr(model, "forward") else runner_of(model, given.kernels, context_tokens)
    return MlxEngine(runner, info, given, **options)


def runner_of(
    model: Any, kernels: Literal["auto", "mlx", "metal", "mlx-lm"] = "auto", context_tokens: int = 2048
) -> Any:
    """A new runner for a model of mlx-lm, or with `mlx-lm` that of its own code; what opening finds out about the model
    is known to later tests."""
    if kernels == "mlx-lm":
        return once(model, "mlx-lm", lambda: open_runner(model)).anew()
    opened = once(model, ("runner", kernels), lambda: open_model(model, *find_ops(kernels)).runner)
    if isinstance(opened, SlotRunner):
        return SlotRunner(opened.decoder, context_tokens)
    assert isinstance(opened, MlxLmRunner)
    return opened.anew()


def engine_options(options: dict[str, Any]) -> EngineOptions:
    """Takes the fields of `EngineOptions` out of `options`. Chunks do not depend on how fast the machine is."""
    names = options.keys() & {field.name for field in dataclasses.fields(EngineOptions)}
    given = {name: options.pop(name) for name in names}
    return EngineOptions(**({"prefill_chunk": 512, "prefill_ms": 0} | given))


def step(engine: Any, run: Run) -> None:
    """One `next()`, added to `run`."""
    result = engine.next()
    for token in result.tokens:
        run.tokens.setdefault(token.row, []).append(token)
    run.prefills += result.prefills
    run.failures += result.failures
    run.drafts += result.drafts


def finish(engine: Any, run: Run | None = None) -> Run:
    """Step until no row is left."""
    run = run or Run()
    for _ in range(STEPS_MAX):
        stats = engine.stats()
        if not stats.rows_decoding and not stats.rows_prefilling:
            return run
        step(engine, run)
    raise AssertionError(f"rows are left after {STEPS_MAX} steps")


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm's own generator makes of `prompt`."""

    def generate() -> list[int]:
        steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
        return [int(token) for _, (token, _) in zip(range(count), steps, strict=False)]

    return list(once(model, ("greedy", tuple(prompt), count), generate))


def alone(model: Any, request: RowRequest) -> list[int]:
    """The output of `request` in an engine of its own."""

    def generate() -> list[int]:
        engine = make_engine(model)
        assert engine.insert([request]) == []
        return finish(engine).ids(request.row)

    return list(once(model, repr(request), generate))


def logits_after(model: Any, tokens: Sequence[int]) -> Any:
    """The model's logits after `tokens`, as a numpy array in float32."""
    import numpy as np

    return np.array(model(mx.array([list(tokens)]))[0, -1].astype(mx.float32))
