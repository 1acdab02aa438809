"""Decode steps that NumPy computes: the logits of mlx-lm, in the caches of the batch, with one wait for MLX."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.models.families import FAMILY, PACKED, build_packed
from tests.engine.models.test_decoder import TEXTS, alike, steps
from tests.support.models import LLAMA, build_model
from zmqengine.engine import kv
from zmqengine.engine.models.cpu_ops import CpuOps
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import read_weights
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.models.step_ops import _TOKENS_APART_MAX, StepOps, supports

OTHERS = ("traditional rope", "experts", "experts, not normalised", "some sparse layers", "one dense layer")


def opened(model: Any) -> DecoderModel:
    return DecoderModel(read_weights(model, in_columns=True), CpuOps())


def batch_of(model: Any, texts: list[list[int]]) -> kv.KVBatch:
    """A batch of rows that have read `texts`."""
    alone = [kv.new_caches(model) for _ in texts]
    mx.eval([kv.prefill_row(model, caches, text) for caches, text in zip(alone, texts, strict=True)])
    return kv.KVBatch.merge(alone, list(map(len, texts)))


@pytest.mark.parametrize("rows", [1, len(TEXTS), _TOKENS_APART_MAX + 2])
@pytest.mark.parametrize("name", FAMILY)
def test_steps_are_those_of_mlx_lm(name: str, rows: int) -> None:
    """Plain ones and verify blocks that roll back, with each kind of position; other weights are left to MLX."""
    texts = [*TEXTS, [8, 8], [1, 2, 3]][:rows]
    widths = [1, 1, 3, 1, 1] if name != "sliding window" else [1, 1, 1]
    model = build_model(FAMILY[name])
    wanted = steps(model, widths, texts)
    decoder = opened(model)
    assert supports(decoder.weights) is (name not in OTHERS)
    for got, expected in zip(steps(decoder, widths, texts), wanted, strict=True):
        assert alike(got, expected)


def test_quantised_and_half_weights_are_left_to_mlx() -> None:
    """NumPy has no such products."""
    half = build_model(LLAMA)
    half.set_dtype(mx.float16)
    for model in (half, build_packed(LLAMA, next(iter(PACKED)))):
        assert not supports(read_weights(model))


def test_weights_are_in_memory_once() -> None:
    """NumPy reads the arrays of MLX."""
    decoder = opened(build_model(LLAMA))
    assert decoder._steps is not None
    theirs, ours = (weights.layers[0].out.transposed for weights in (decoder.weights, decoder._steps.weights))
    assert isinstance(ours, np.ndarray)
    assert np.shares_memory(np.asarray(theirs), ours)


def test_batches_of_unlike_rows_share_a_step() -> None:
    """Two batches give the logits that each gives alone."""
    decoder = opened(build_model(LLAMA))
    texts = [TEXTS[:2], TEXTS[2:]]
    inputs = [mx.array([[5], [9]]), mx.array([[7], [3]])]
    alone = []
    for own, tokens in zip(texts, inputs, strict=True):
        batch = batch_of(decoder, own)
        alone.append(decoder(tokens, cache=batch.begin_step(tokens)))
    batches = [batch_of(decoder, own) for own in texts]
    segments = [
        Segment(tokens, batch.begin_step(tokens)) for batch, tokens in zip(batches, inputs, strict=True)
    ]
    for got, wanted in zip(decoder.packed(segments), alone, strict=True):
        assert alike(got, wanted)


def test_a_step_waits_for_mlx_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its positions: keys and values are written in place, except where the arrays are new, and up to four rows
    are multiplied one by one."""
    decoder = opened(build_model(LLAMA))
    batch = batch_of(decoder, TEXTS[:2])
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(*arguments, **options)

        return count

    monkeypatch.setattr(mx.fast, "rope", counted("rope", mx.fast.rope))
    monkeypatch.setattr(mx, "eval", counted("eval", mx.eval))
    monkeypatch.setattr(kv.RaggedKVCache, "write", counted("write", kv.RaggedKVCache.write))
    seen = []
    for _ in range(3):
        counts.clear()
        inputs = mx.array([[5], [9]])
        batch.launch(decoder(inputs, cache=batch.begin_step(inputs)))
        seen.append(dict(counts))
    layers = len(decoder.layers)
    assert layers > 1
    assert seen == [{"rope": 1, "eval": layers, "write": layers}, {"rope": 1}, {"rope": 1}]


def test_few_tokens_are_multiplied_one_by_one() -> None:
    """Each as by itself, to the last bit: no product of matrices has copied the weights first."""
    weights = read_weights(build_model(LLAMA), in_columns=True)
    in_numpy: Any = np.asarray(weights.layers[0].out.transposed)
    linear = weights.layers[0].out._replace(transposed=in_numpy)
    inputs = np.random.default_rng(1).normal(size=(_TOKENS_APART_MAX, linear.inputs)).astype(np.float32)
    found = StepOps().product(inputs, linear)
    alone = [StepOps().product(row[None], linear) for row in inputs]
    assert np.array_equal(found, np.concatenate(alone))
