"""A model is opened on the decoder, tuned to the device, or left to mlx-lm where the decoder is not for it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama

from tests.engine.models.families import FAMILY, MOE, build_packed
from tests.engine.models.test_decoder import alike, steps, whole
from tests.support.models import LLAMA, MIXTURE, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.autotune.products import name_of
from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.cpu.numpy_ops import NumpyOps
from zmqengine.engine.cuda import cuda_ops
from zmqengine.engine.load import open_model as opening
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.load.probe import rows_of
from zmqengine.engine.models import ops as ops_module
from zmqengine.engine.models.attention import WIDTH_MAX, MlxAttention
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.layers import Experts
from zmqengine.engine.models.mlx_lm_runner import MlxLmRunner
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner

ROWS = [1, 2, 4, 256]


def opened(model: Any, remembered: SavedChoices | None = None, **options: Any) -> opening.OpenedModel:
    ops = PlainOps()
    return open_model(model, ops, ops, remembered, rows_max=4, seconds_max=30.0, **options)


def decoder_of(found: opening.OpenedModel) -> DecoderModel:
    assert isinstance(found.runner, SlotRunner)
    return found.runner.decoder


def is_served(found: opening.OpenedModel, model: Any, widths: tuple[int, ...] = (1, 3)) -> bool:
    """Whether the logits are those of mlx-lm's model."""
    return all(map(alike, steps(found.runner, widths), whole(model, widths)))


@pytest.mark.parametrize("name", ["llama", "qwen3", "experts", "sliding window"])
def test_the_family_runs_on_the_decoder(name: str) -> None:
    """And tells so; on NumPy where a CPU computes it in float32."""
    model = build_model(FAMILY[name])
    ops = NumpyOps()
    for found in (opened(model), open_model(model, ops, ops)):
        assert is_served(found, model)
        assert found.facts == {"model_code": "ours"}
    assert decoder_of(found).ops is ops


def test_other_architectures_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, for people."""
    model = build_model(MIXTURE)
    with caplog.at_level(logging.INFO, "zmqengine.engine"):
        found = opened(model)
    assert isinstance(found.runner, MlxLmRunner)
    assert found.runner.model is model
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
    found = opened(model)
    assert isinstance(found.runner, MlxLmRunner)
    assert "logits differ from mlx-lm" in caplog.text


def test_a_decoder_that_raises_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason, the model is served."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such operation here")

    monkeypatch.setattr(PlainOps, "rotate", fail)
    model = build_model(LLAMA)
    found = opened(model)
    assert isinstance(found.runner, MlxLmRunner)
    assert "the decoder fails" in caplog.text


class WrongOps(PlainOps):
    """Forgets the norms, as a kernel that is wrong on a device might."""

    def add_and_norm(self, hidden: mx.array, added: mx.array, *_: Any) -> Any:
        total = hidden + added
        return total, total


class TippedOps(PlainOps):
    """Chooses other experts for some of the tokens, as rounding does."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._seen = 0

    def mixture(self, inputs: mx.array, logits: mx.array, experts: Experts) -> mx.array:
        numbers = mx.arange(self._seen, self._seen + inputs.shape[0])
        self._seen += inputs.shape[0]
        # The experts with the least logits, for a share of the tokens.
        is_tipped = numbers % 10 < round(10 * self._share)
        other = super().mixture(inputs, -logits, experts)
        return mx.where(is_tipped[:, None], other, super().mixture(inputs, logits, experts))


@pytest.mark.parametrize(("share", "are_used"), [(0.1, True), (0.9, False)])
def test_kernels_may_choose_other_experts_for_few_tokens(share: float, are_used: bool) -> None:
    """Rounding does so; a wrong kernel is wrong for most tokens."""
    reference, ops = PlainOps(), TippedOps(share)
    model = build_packed(MOE, "4 bits by 64")
    model.set_dtype(mx.float16)
    found = open_model(model, ops, reference)
    assert decoder_of(found).ops is (ops if are_used else reference)


@pytest.mark.parametrize("config", [LLAMA, MOE])
def test_kernels_that_compute_something_else_are_not_used(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """MLX's operations are taken instead."""
    reference = PlainOps()
    found = open_model(build_model(config), WrongOps(), reference)
    assert decoder_of(found).ops is reference
    assert "kernels for this device differ from the reference" in caplog.text
    assert "differ" in found.facts["model_code"]


class WrongAttention(MlxAttention):
    """Wrong in one of the shapes that a step may have: the width of short rows, a prompt, or a prompt beside rows."""

    def __init__(self, *given: Any, wrong: str) -> None:
        super().__init__(*given)
        self._wrong = wrong

    def attend(self, layout: Any, layer: int, qkv: Any) -> mx.array:
        attended = super().attend(layout, layer, qkv)
        for pool in layout.pools:
            short, prompts = pool.layout.short, pool.layout.prompts
            width = 0 if short is None else short.tokens.shape[1]
            shape = str(width) if not prompts else "prompt" if short is None else "both"
            if shape == self._wrong:
                # The first token gets what is another token's.
                return mx.concatenate([attended[1:2], attended[1:]])
        return attended


@pytest.mark.parametrize(
    ("wrong", "replays"),
    [
        *((wrong, False) for wrong in ("", "1", "2", "4", str(WIDTH_MAX), "prompt", "both")),
        *((wrong, True) for wrong in ("", "2", "both")),
    ],
)
def test_attention_that_computes_something_else_is_not_used(wrong: str, replays: bool) -> None:
    """Whatever the step in which it does."""

    class Other(PlainOps):
        def attention(self, heads: Any, caches: Any) -> Any:
            return WrongAttention(heads, caches, wrong=wrong)

    ops, reference = Other(), PlainOps()
    found = open_model(build_model(LLAMA), ops, reference, replays=replays, rows_max=1)
    assert decoder_of(found).ops is (reference if wrong else ops)


def test_every_kernel_for_a_number_of_rows_is_compared() -> None:
    """Also one that was remembered: a step of three rows has 3, 6, 12 or 24 tokens, and a prompt more. The last step is
    one of rows in decode and a prompt."""
    found = opening._many_logits(DecoderModel(read_weights(build_model(LLAMA)), PlainOps()))
    shapes = [logits.shape for logits in found]
    blocks = [(width, VOCAB_SIZE) for width in opening._WIDTHS for _ in range(3)]
    assert shapes == [(40, VOCAB_SIZE)] * len(opening._PROMPTS) + blocks + [(1, VOCAB_SIZE)] * 4
    tokens = [*(3 * width for width in opening._WIDTHS), *opening._PROMPTS]
    for fewer, rows in itertools.pairwise((0, *cuda_ops.ROWS, 1 << 20)):
        assert any(fewer < count <= rows for count in tokens), rows


@pytest.mark.parametrize("name", ["4 bits by 64", "8 bits by 64"])
def test_measured_products_give_the_same_and_are_remembered(name: str, tmp_path: Any) -> None:
    """Logits stay within a rounding, and the next start measures nothing."""
    remembered = SavedChoices("a device", "1.0", tmp_path)
    model = build_packed({**LLAMA, "tie_word_embeddings": False}, name)
    first = opened(model, remembered)
    assert is_served(first, model)
    assert "256 rows: " in first.facts["products"]
    layer: Any = decoder_of(first).weights.layers[0]
    linear = layer.out
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
    found = opened(model, SavedChoices("a device", "1.0", tmp_path))
    assert found.facts == {"model_code": "ours"}
    assert is_served(found, model)


def test_steps_are_traced_where_it_is_asked_for() -> None:
    """Before a row waits for it: for as many tokens as there are rows."""
    calls = decoder_of(opened(build_model(LLAMA), replays=True))._traces._calls
    assert set(calls) == {(rows, None, False) for rows in range(1, 5)}
    assert not decoder_of(opened(build_model(LLAMA)))._traces._calls


def test_what_is_compared_is_compared_sharply() -> None:
    """A factor next to one is another result in float32; another order of a sum is not."""
    logits = np.random.default_rng(1).normal(size=(3, VOCAB_SIZE)).astype(np.float32)
    assert opening._alike([logits], lambda: [logits * (1 + 1e-6)], is_exact=True)
    assert not opening._alike([logits], lambda: [logits * 1.02], is_exact=True)
    assert opening._alike([logits], lambda: [logits * 1.02], is_exact=False)
    assert not opening._alike([logits], lambda: [logits * np.nan], is_exact=False)
    assert not opening._alike([logits], lambda: [], is_exact=False)


def test_a_model_that_mlx_lm_does_not_run_here_is_run_by_the_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As gpt_oss on CUDA, where MLX lacks a product: experts are dequantised, and the log says that nothing was
    compared. A model of another family fails with MLX's words."""
    model = build_model(ARCHITECTURES["gpt_oss"])
    quantize(model, group_size=32, bits=4, mode="mxfp4")
    prompt = mx.array([[1, 2, 3, 4]])
    wanted = model(prompt)[0, -1]

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[gather_qmm] No implementation for problem shape")

    monkeypatch.setattr(mx, "gather_qmm", refuse)
    monkeypatch.setattr(ops_module, "_GATHERS", {})
    found = opened(model)
    (row,) = rows_of([[1, 2, 3, 4]])
    row.cache = found.runner.open(4)
    logits = found.runner.forward([RowPiece(row, 0, 4, samples=1)], prompt[0], 1).logits
    assert logits is not None
    assert mx.allclose(logits[0, 0], wanted, rtol=1e-3, atol=1e-3)
    assert "mlx-lm's own code does not run here" in caplog.text
    assert "not compared" in found.facts["model_code"]
    mixtral = build_model(MIXTURE)
    quantize(mixtral, group_size=32, bits=4, mode="mxfp4")
    with pytest.raises(RuntimeError, match="No implementation"):
        opened(mixtral)
