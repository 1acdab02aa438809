"""A model is opened on the decoder, tuned to the device, or left to mlx-lm where the decoder is not for it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from tests.engine.models.families import FAMILY, MOE, build_packed
from tests.engine.models.test_decoder import alike, steps
from tests.support import cuda_kernels
from tests.support.models import LLAMA, MIXTURE, VOCAB_SIZE, build_model
from zmqengine.engine.autotune.products import name_of
from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.cuda import attention, cuda_ops
from zmqengine.engine.cuda.attention_in_place import TracedInPlace
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.load import open_model as opening
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import Experts
from zmqengine.engine.models.ops import PlainOps

ROWS = [1, 2, 4, 256]


def opened(model: Any, remembered: SavedChoices | None = None, **options: Any) -> opening.OpenedModel:
    ops = PlainOps()
    return open_model(model, ops, ops, remembered, rows_max=4, seconds_max=30.0, **options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "experts", "sliding window"])
def test_the_family_runs_on_the_decoder(name: str) -> None:
    """And tells so."""
    found = opened(build_model(FAMILY[name]))
    assert isinstance(found.model, DecoderModel)
    assert found.facts == {"model_code": "ours"}


def test_other_architectures_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, for people."""
    model = build_model(MIXTURE)
    with caplog.at_level(logging.INFO, "zmqengine.engine"):
        found = opened(model)
    assert found.model is model
    assert found.facts == {"model_code": "mlx-lm's: mixtral is another architecture"}
    assert "mlx-lm's own code runs this model" in caplog.text


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_model_that_computes_something_else_is_left_to_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: mx.Dtype
) -> None:
    """As after a release of mlx-lm that changes a formula and no weights: noticed, told, and served."""
    own = vars(llama)["swiglu"]
    factor = 1.05 if dtype == mx.float32 else 1.3
    monkeypatch.setattr(llama, "swiglu", lambda gate, up: own(gate, up) * factor)
    model = build_model(LLAMA)
    model.set_dtype(dtype)
    wanted = steps(model, [1, 2])
    found = opened(model)
    assert found.model is model
    assert "logits differ from mlx-lm" in caplog.text
    assert all(map(mx.array_equal, steps(found.model, [1, 2]), wanted))


def test_a_decoder_that_raises_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason, the model is served."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such operation here")

    monkeypatch.setattr(PlainOps, "rotate", fail)
    model = build_model(LLAMA)
    assert opened(model).model is model
    assert "the decoder fails" in caplog.text


class WrongOps(PlainOps):
    """Forgets the norms, as a kernel that is wrong on a device might."""

    def add_and_norm(self, hidden: mx.array, added: mx.array, norm: Any) -> Any:
        total = hidden + added
        return total, total


class TippedOps(PlainOps):
    """Chooses other experts for some of the tokens, as rounding does."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._seen = 0

    def mixture(self, inputs: mx.array, mlp: Experts) -> mx.array:
        numbers = mx.arange(self._seen, self._seen + inputs.shape[0])
        self._seen += inputs.shape[0]
        router = mlp.router
        # The experts with the least logits, for a share of the tokens.
        turned = router._replace(scales=-router.scales, biases=-router.biases)  # type: ignore[operator]
        is_tipped = numbers % 10 < round(10 * self._share)
        other = super().mixture(inputs, mlp._replace(router=turned))
        return mx.where(is_tipped[:, None], other, super().mixture(inputs, mlp))


@pytest.mark.parametrize(("share", "are_used"), [(0.1, True), (0.9, False)])
def test_kernels_may_choose_other_experts_for_few_tokens(share: float, are_used: bool) -> None:
    """Rounding does so; a wrong kernel is wrong for most tokens."""
    reference, ops = PlainOps(), TippedOps(share)
    model = build_packed(MOE, "4 bits by 64")
    model.set_dtype(mx.float16)
    found = open_model(model, ops, reference)
    assert found.model.ops is (ops if are_used else reference)


@pytest.mark.parametrize("config", [LLAMA, MOE])
def test_kernels_that_compute_something_else_are_not_used(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """MLX's operations are taken instead."""
    reference = PlainOps()
    found = open_model(build_model(config), WrongOps(), reference)
    assert found.model.ops is reference
    assert "kernels for this device differ from the reference" in caplog.text
    assert "differ" in found.facts["model_code"]


@pytest.mark.skipif(on_cuda(), reason="the device runs them")
@pytest.mark.parametrize("wrong", ["", "arrays", "marks", "width"])
def test_traced_attention_that_computes_something_else_is_called_apart(
    wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any step that a trace is for: for one token a row or several, and with gaps."""
    cuda_kernels.stand_in(monkeypatch)
    own = TracedInPlace.step

    def changed(self: Any, caches: Any, width: int, offset: mx.array) -> Any:
        found = own(self, caches, width, offset)
        if found is not None and wrong == "arrays":
            found = found._replace(layers=[[values, keys] for keys, values in found.layers])
        if found is not None and wrong == "marks":
            found.shared[-1] = attention.nothing()
        if found is not None and wrong == "width" and width == 4:
            found.shared[1] = found.shared[1] + 1
        return found

    monkeypatch.setattr(TracedInPlace, "step", changed)
    found = open_model(build_model({**LLAMA, "head_dim": 64}), CudaOps(), PlainOps())
    assert isinstance(found.model.ops, CudaOps)
    assert (found.model.traced_attention is None) == bool(wrong)
    assert ("traced attention differs from the reference" in caplog.text) == bool(wrong)
    assert found.facts["model_code"] == ("ours, with attention apart: traced it differs" if wrong else "ours")
    monkeypatch.undo()
    cuda_kernels.forget()


def test_every_kernel_for_a_number_of_rows_is_compared() -> None:
    """Also one that was remembered: a step of three rows has 3, 6, 12 or 24 tokens, and a prompt more. The last step is
    a packed one."""
    found = opening._many_logits(DecoderModel(opened(build_model(LLAMA)).model.weights, PlainOps()))
    shapes = [logits.shape for logits in found]
    assert shapes == [(40, VOCAB_SIZE)] * len(opening._PROMPTS) + [(3, VOCAB_SIZE)] * 6 + [(1, VOCAB_SIZE)]
    tokens = [*(3 * width for width in (1, *opening._WIDTHS)), *opening._PROMPTS]
    for fewer, rows in itertools.pairwise((0, *cuda_ops.ROWS, 1 << 20)):
        assert any(fewer < count <= rows for count in tokens), rows


@pytest.mark.parametrize("name", ["4 bits by 64", "8 bits by 64"])
def test_measured_products_give_the_same_and_are_remembered(name: str, tmp_path: Any) -> None:
    """Logits stay within a rounding, and the next start measures nothing."""
    remembered = SavedChoices("a device", "1.0", tmp_path)
    model = build_packed({**LLAMA, "tie_word_embeddings": False}, name)
    wanted = steps(model, [1, 3])
    first = opened(model, remembered)
    assert all(map(alike, steps(first.model, [1, 3]), wanted))
    assert "256 rows: " in first.facts["products"]
    linear = first.model.weights.layers[0].out
    assert {name_of(linear, rows) for rows in ROWS} <= set(remembered.choices)
    again = SavedChoices("a device", "1.0", tmp_path)
    assert again.choices == remembered.choices
    # No time for a measurement is needed.
    ops = PlainOps()
    known = open_model(
        build_packed({**LLAMA, "tie_word_embeddings": False}, name), ops, ops, again, rows_max=4
    )
    assert known.facts == first.facts
    assert SavedChoices("another device", "1.0", tmp_path).choices == {}


def test_products_of_other_modes_are_not_measured(tmp_path: Any) -> None:
    """MLX multiplies them in its own way."""
    model = build_packed(LLAMA, "mxfp4")
    wanted = steps(model, [1, 3])
    found = opened(model, SavedChoices("a device", "1.0", tmp_path))
    assert found.facts == {"model_code": "ours"}
    assert all(map(alike, steps(found.model, [1, 3]), wanted))


def test_steps_are_traced_where_it_is_asked_for() -> None:
    """Before a row waits for it."""
    calls = opened(build_model(LLAMA), traces=True).model._traces.calls
    assert {(rows, 1, None) for rows in range(1, 5)} <= set(calls)


def test_what_is_compared_is_compared_sharply() -> None:
    """A factor next to one is another result in float32; another order of a sum is not."""
    logits = np.random.default_rng(1).normal(size=(3, VOCAB_SIZE)).astype(np.float32)
    assert opening._alike([logits], lambda: [logits * (1 + 1e-6)], is_exact=True)
    assert not opening._alike([logits], lambda: [logits * 1.02], is_exact=True)
    assert opening._alike([logits], lambda: [logits * 1.02], is_exact=False)
    assert not opening._alike([logits], lambda: [logits * np.nan], is_exact=False)
    assert not opening._alike([logits], lambda: [], is_exact=False)
