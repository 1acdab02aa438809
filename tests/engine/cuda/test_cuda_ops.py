"""`CudaOps` drives its kernels as they are to be driven: with plain arithmetic in their place it computes the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize

from tests.engine.models.families import LLAMA_3_ROPE, MOE, YARN
from tests.support.models import LLAMA, SLIDING, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.cuda.cuda_ops import QUANTISED_ROWS_MAX, CudaOps
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.load.probe import rows_of, steps_of
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.layers import Experts, Linear
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.models.tree import parts_of

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.skipif(on_cuda(), reason="kernels are there")]

# In half precision these models, whose weights are large, make some percent of one rounding in another order. What is
# driven wrongly is off by more, and in float32, where products are MLX's, by more than the last digits.
TOLERANCES = {mx.float16: 0.1, mx.float32: 1e-4}
WIDE: dict[str, Any] = {
    **LLAMA, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 3,
}  # fmt: skip
BASE = {key: value for key, value in WIDE.items() if key != "model_type"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "llama3 rope": {**WIDE, "rope_scaling": LLAMA_3_ROPE},
    "biases": {**WIDE, "attention_bias": True, "mlp_bias": True},
    "head of its own": {**WIDE, "tie_word_embeddings": False},
    "qwen2": {**BASE, "model_type": "qwen2", "num_key_value_heads": 1},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "experts": {**MOE, **BASE},
    "yarn rope": {**BASE, "model_type": "qwen3", "rope_scaling": YARN},
    "traditional rope": {**WIDE, "rope_traditional": True},
    "sliding window": {**SLIDING, "hidden_size": 256, "head_dim": 64},
    "gpt_oss": {**ARCHITECTURES["gpt_oss"], "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2},
    "glm4_moe": {
        **ARCHITECTURES["glm4_moe"],
        "hidden_size": 256,
        "head_dim": 128,
        "moe_intermediate_size": 64,
    },
    # Added states have norms of their own, and float16 is refused.
    "gemma3": {**ARCHITECTURES["gemma3_text"], "hidden_size": 256, "head_dim": 64},
    # Heads without a kernel for attention.
    "small heads": {**WIDE, "head_dim": 32},
}
WITHOUT_ATTENTION = ("small heads",)
WITH_EXPERTS = ("experts", "gpt_oss", "glm4_moe")
TEXTS = [list(range(5, 60)), [3, 1, 4, 1, 5], [9, 2, 6, *range(100, 140)], [7, 8]]


def alike(got: list[np.ndarray], wanted: list[np.ndarray], dtype: mx.Dtype, share: float = 1.0) -> bool:
    """But for rounding, in at least this share of the tokens."""
    one, other = np.concatenate(got), np.concatenate(wanted)
    errors = np.linalg.norm(one - other, axis=-1) / np.linalg.norm(other, axis=-1)
    return bool(np.mean(errors <= TOLERANCES[dtype]) >= share)


def opened(config: dict[str, Any], dtype: mx.Dtype, bits: int = 0) -> tuple[DecoderModel, DecoderModel]:
    """The same model on MLX's operations and on `CudaOps`."""
    model = build_model(config)
    model.set_dtype(dtype)
    if bits:
        quantize(model, group_size=64, bits=bits)
    weights = read_weights(model)
    ops = CudaOps()
    for linear in parts_of(weights, Linear):
        choose(ops, linear)
    return DecoderModel(weights, PlainOps(QUANTISED_ROWS_MAX)), DecoderModel(weights, ops, replays=True)


def steps(decoder: DecoderModel, widths: list[int]) -> list[np.ndarray]:
    """Logits of rows in steps of these widths, after their prompts."""
    return steps_of(SlotRunner(decoder, 2048), together=True, widths=widths, prompts=TEXTS)


def choose(ops: CudaOps, linear: Any) -> None:
    """The variant with the least of MLX in it for each number of rows."""
    rows = [1, *ops.measured_rows(linear), 1 << 20]
    ops.choose(linear, {count: list(ops.variants(linear, count))[-1] for count in rows})


CASES = [(mx.float32, name) for name in CONFIGS]
CASES += [(mx.float16, name) for name in CONFIGS if name != "gemma3"]


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_every_kernel_is_given_what_it_takes(plain_kernels: list[str], name: str, dtype: mx.Dtype) -> None:
    """Prompts, steps and verify blocks."""
    # MLX gathers experts in half precision on a GPU only, packed ones everywhere.
    bits = 4 if name in WITH_EXPERTS and dtype == mx.float16 else 0
    # A rounding may tip an expert, or where a token looks; what is driven wrongly is wrong for most of them.
    share = 0.6 if dtype == mx.float16 else 1.0
    plain, tuned = opened(CONFIGS[name], dtype, bits)
    widths = [1, 3, 8, 1, 12]
    wanted = steps(plain, widths)
    assert not plain_kernels
    assert alike(steps(tuned, widths), wanted, dtype, share)
    kernels = {"residual_norm"}
    attention = {"rotary_heads", "attention"}
    if dtype == mx.float16:
        kernels |= {"quantised_product", "experts_packed_product"} if bits else {"plain_product"}
        if name not in WITHOUT_ATTENTION:
            kernels |= attention
    assert kernels <= set(plain_kernels)
    assert attention <= kernels or not attention & set(plain_kernels)


def test_experts_in_half_precision_go_through_their_kernels(plain_kernels: list[str]) -> None:
    """MLX has no such products on a CPU: the reference is in float32."""
    plain, _ = opened(CONFIGS["experts"], mx.float32)
    wanted = steps(plain, [1, 2])
    assert not plain_kernels
    _, tuned = opened(CONFIGS["experts"], mx.float16)
    assert alike(steps(tuned, [1, 2]), wanted, mx.float16, 0.6)
    layers = len(parts_of(tuned.layers, Experts))
    # Prompts, and two steps.
    calls = (len(TEXTS) + 2) * layers
    assert plain_kernels.count("experts_route") == plain_kernels.count("experts_sum") == calls
    assert plain_kernels.count("experts_product") == 2 * calls


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_go_through_their_kernel(plain_kernels: list[str], bits: int) -> None:
    """Up to 64 rows; more are multiplied in full width."""
    plain, tuned = opened(WIDE, mx.float16, bits)
    assert alike(steps(tuned, [1, 2]), steps(plain, [1, 2]), mx.float16)
    assert plain_kernels.count("quantised_product") > 10
    ops = CudaOps()
    linear = parts_of(plain.layers, Linear)[-1]
    assert [ops.unmeasured(linear, rows) for rows in (1, 2, 64, 65)] == [
        "product",
        "kernel",
        "kernel",
        "dequantised",
    ]


def test_a_step_takes_two_kernels_a_layer_for_attention(plain_kernels: list[str]) -> None:
    """Whatever its pieces: rows in decode of two pools, prompts, and scored tokens."""
    logits = []
    for decoder in opened(WIDE, mx.float16):
        runner = SlotRunner(decoder, 2048)
        rows = rows_of([*TEXTS, list(range(40)) * 14])
        for row in rows:
            row.cache = runner.open(len(row.tokens))
        runner.forward([RowPiece(rows[4], 0, 559)], mx.array(rows[4].tokens[:-1], mx.uint32), 1)
        # As behind a prompt with images: positions are ahead of columns.
        rows[4].prefill_tokens, rows[4].shift = 559, 9
        plain_kernels.clear()
        pieces = [
            RowPiece(rows[4], 559, 1, samples=1),
            RowPiece(rows[3], 0, 2, samples=1),
            RowPiece(rows[0], 0, 40),
            RowPiece(rows[2], 0, 43, samples=1, scored=(10, 20)),
        ]
        tokens = [
            token for piece in pieces for token in piece.row.tokens[piece.start : piece.start + piece.count]
        ]
        outputs = runner.forward(pieces, mx.array(tokens, mx.uint32), 1)
        assert outputs.logits is not None
        logits.append(
            [np.array(array.astype(mx.float32)) for array in (outputs.logits[:, 0], *outputs.scored)]
        )
    wanted, got = logits
    assert alike(got, wanted, mx.float16)
    layers = len(decoder.layers)
    attends = plain_kernels.count("attention") + plain_kernels.count("attention_part")
    assert plain_kernels.count("rotary_heads") == attends == layers
    assert "write_columns" not in plain_kernels
