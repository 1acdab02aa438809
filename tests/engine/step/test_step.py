"""Rows of a step get what plain mlx-lm gives for their own tokens: in flight, resumed, parked, spoilt."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, greedy, make_engine, step
from tests.support.models import LLAMA, build_model
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest, Sampling

# A step is launched while the tokens of the one before are on the device, as on a GPU.
GPU = Device(is_gpu=True)
COUNT = 12
BAD = 7
# Log-probabilities of float32 logits; a token or a position too many moves them by more.
TOLERANCE = 1e-3


def prompt(length: int, seed: int) -> list[int]:
    return [20 + (place * (seed % 11 + 3) + seed * 7 + place * place) % 290 for place in range(length)]


def is_exact(model: Any, request: RowRequest, run: Run) -> bool:
    """Whether the tokens are greedy ones, and their log-probabilities those of their own text."""
    before = [*request.prompt, *request.emitted]
    ids = run.ids(request.row)
    logits = np.array(
        model(mx.array([[*before, *ids[:-1]]]))[0, len(before) - 1 :].astype(mx.float32), np.float64
    )
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    told = [token.logprobs.logprob for token in run.tokens[request.row] if token.logprobs is not None]
    assert len(told) == len(ids)
    exact = np.abs(told - logprobs[range(len(ids)), ids]) <= TOLERANCE
    return (
        bool(exact.all())
        and logits.argmax(axis=-1).tolist() == ids
        and len(request.emitted) + len(ids) == request.max_tokens
    )


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
def test_tokens_in_flight_are_those_of_their_rows(models: Any, shape: str, kernels: str) -> None:
    """While rows join, end and are removed: the order of rows in a step is not that of the one before."""
    model, run = models[shape], Run()
    engine = make_engine(model, device=GPU, kernels=kernels, prefill_chunk=32, prefill_chunk_idle=32)
    prompts = [prompt(length, row) for row, length in enumerate((40, 3, 1, 70, 9, 20))]
    for row, one in enumerate(prompts):
        assert engine.insert([RowRequest(row, one, 4 + 3 * row)]) == []
        step(engine, run)
        step(engine, run)
        if row == 4:
            engine.remove([3])
    finish(engine, run)
    for row, one in enumerate(prompts):
        wanted = greedy(model, one, 4 + 3 * row)
        assert run.ids(row) == (wanted[: len(run.ids(row))] if row == 3 else wanted)


@pytest.mark.parametrize("device", [Device(), GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_rows_that_resume_go_on_with_their_own_text(model: Any, kernels: str, device: Device) -> None:
    """From a cached prefix, from emitted tokens, and parked: to the position, beside others."""
    engine = make_engine(model, kernels=kernels, device=device, rows_max=8)
    first = RowRequest(0, prompt(150, 1), COUNT, logprobs=0)
    others = [RowRequest(1, prompt(9, 2), 60, logprobs=0), RowRequest(2, prompt(30, 3), 60, logprobs=0)]
    assert engine.insert([first, *others]) == []
    run = Run()
    while not run.ended(0):
        step(engine, run)
    assert is_exact(model, first, run)
    answer = run.ids(0)
    resumed = [
        RowRequest(10, [*first.prompt, *answer, *prompt(25, 4)], COUNT, logprobs=0),
        RowRequest(11, [*first.prompt[:100], *prompt(40, 5)], COUNT, logprobs=0),
        RowRequest(12, first.prompt, COUNT, emitted=answer[:5], logprobs=0),
    ]
    assert engine.insert(resumed) == []
    for _ in range(3):
        step(engine, run)
    # The cache holds all but the last token of an answer, and whole blocks.
    assert run.cached(10) == 150 + COUNT - 1
    assert 64 <= run.cached(11) <= 100
    assert run.cached(12) == 154
    engine.park(1)
    parked = RowRequest(13, others[0].prompt, 60, emitted=run.ids(1), logprobs=0)
    assert engine.insert([parked]) == []
    finish(engine, run)
    for request in (*resumed, others[1], parked):
        assert is_exact(model, request, run), request.row


@pytest.mark.parametrize("device", [Device(), GPU], ids=["cpu", "gpu"])
def test_rejected_drafts_leave_nothing(model: Any, device: Device) -> None:
    """Blocks of any width, with some right and some wrong tokens: exact to the log-probability."""
    requests = [RowRequest(row, prompt(5 + 30 * row, row), 40, logprobs=0) for row in range(3)]
    outputs = {(tuple(one.prompt), 0): greedy(model, one.prompt, 40) for one in requests}

    class Known(Erring):
        """Errs in some tokens, whatever the seed."""

        def of_row(self, row: Any, count: int) -> Any:
            made = len(row.tokens) - row.prompt_tokens
            wanted = outputs[tuple(row.tokens[: row.prompt_tokens]), 0][made : made + count]
            return [token if self._random.random() < 0.7 else 9 for token in wanted]

    engine = make_engine(model, device=device, speculator=speculator(Known(outputs)))
    assert engine.insert(requests) == []
    run = finish(engine)
    assert run.drafts
    assert all(is_exact(model, request, run) for request in requests)


@functools.cache
def spoiling_model() -> Any:
    """Keys and values of one token are not numbers."""
    model = build_model({**LLAMA, "tie_word_embeddings": False})
    model.model.embed_tokens.weight[BAD] = mx.nan
    return model


@pytest.mark.parametrize(("kernels", "device"), [("auto", Device()), ("mlx", GPU)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("ends", ["stop", "length", "removed", "parked"])
def test_a_row_that_ends_in_flight_leaves_nothing_to_others(kernels: str, device: Device, ends: str) -> None:
    """Its last token has been computed ahead, and what that leaves may not be a number."""
    model = spoiling_model()
    engine = make_engine(model, kernels=kernels, device=device)
    text = prompt(100, 1)
    request = RowRequest(
        0,
        text,
        1 if ends == "length" else COUNT,
        stop_token_ids=frozenset({BAD} if ends == "stop" else ()),
        sampling=Sampling(logit_bias={BAD: 100.0}),
    )
    # The row beside keeps the arrays of their pool.
    assert engine.insert([request, RowRequest(9, prompt(10, 9), 150)]) == []
    run = Run()
    while 0 not in run.tokens:
        step(engine, run)
    assert run.ids(0)[0] == BAD
    if ends == "parked":
        engine.park(0)
    else:
        engine.remove([0])
    # In the same slot, then one that begins with the prompt of the row that ended.
    later = [
        RowRequest(1, prompt(60, 2), COUNT, logprobs=0),
        RowRequest(2, [*text, 30, 31], COUNT, logprobs=0),
    ]
    for one in later:
        assert engine.insert([one]) == []
        while not run.ended(one.row) and not any(failure.row == one.row for failure in run.failures):
            step(engine, run)
    assert [failure for failure in run.failures if failure.row] == []
    assert run.cached(2) <= len(text)
    assert all(is_exact(model, one, run) for one in later)
    # What was computed ahead was not kept.
    assert engine.insert([RowRequest(3, [*text, BAD, 30], COUNT)]) == []
    finish(engine, run)
    assert run.cached(3) <= len(text)


@pytest.mark.parametrize("device", [Device(), GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_a_row_that_is_not_a_number_leaves_nothing_to_others(kernels: str, device: Device) -> None:
    """No block for the prefix cache, and no number in its slot that the next row could see."""
    model = spoiling_model()
    engine = make_engine(model, kernels=kernels, device=device, prefill_chunk_idle=64)
    spoilt = prompt(200, 1)
    spoilt[150] = BAD
    beside = RowRequest(1, prompt(20, 2), 30, logprobs=0)
    assert engine.insert([RowRequest(0, spoilt, COUNT), beside]) == []
    run = Run()
    while not run.failures:
        step(engine, run)
        if not engine.stats().rows_decoding:
            # None of its tokens are known to be good yet.
            assert engine.stats().prompt_cache_entries == 0
    assert [failure.row for failure in run.failures] == [0]
    again = RowRequest(2, spoilt[:120], COUNT, logprobs=0)
    assert engine.insert([again]) == []
    finish(engine, run)
    assert run.cached(2) == 0
    assert is_exact(model, beside, run)
    assert is_exact(model, again, run)


@pytest.mark.parametrize("ends", ["stop", "fails"])
def test_a_row_that_ends_before_drafts_is_not_in_the_next_step(ends: str) -> None:
    """A step that may draft lands the one before first: rows that end there are gone, the others go on."""
    model = spoiling_model()
    first, beside = prompt(20, 1), prompt(30, 2)
    wanted = greedy(model, beside, COUNT)

    class Wrong(Erring):
        def of_row(self, row: Any, count: int) -> Any:
            return [9] * count

    engine = make_engine(model, device=GPU, speculator=speculator(Wrong({}), widths=(1, 3)))
    stop = greedy(model, first, COUNT)[5]
    if ends == "stop":
        request = RowRequest(0, first, COUNT, stop_token_ids=frozenset({stop}))
    else:
        request = RowRequest(0, first, COUNT, sampling=Sampling(logit_bias={BAD: 100.0}))
    assert engine.insert([request, RowRequest(1, beside, COUNT)]) == []
    run = finish(engine)
    assert run.ids(1) == wanted
    assert [failure.row for failure in run.failures] == ([0] if ends == "fails" else [])
    assert ends == "fails" or run.finish(0) == "stop"
