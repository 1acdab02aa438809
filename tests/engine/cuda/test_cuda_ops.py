"""`CudaOps` drives its kernels as they are to be driven: with plain arithmetic in their place it computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize

from tests.engine.models.families import LLAMA_3_ROPE, MOE, YARN
from tests.engine.models.test_decoder import steps
from tests.support import cuda_kernels
from tests.support.models import LLAMA, SLIDING, build_model
from zmqengine.engine import kv
from zmqengine.engine.cuda.cuda_ops import QUANTISED_ROWS_MAX, CudaOps
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import Experts, read_weights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.segment import Segment

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
    # Heads that the kernel does not rotate.
    "yarn rope": {**BASE, "model_type": "qwen3", "rope_scaling": YARN},
    "traditional rope": {**WIDE, "rope_traditional": True},
    "small heads": {**WIDE, "head_dim": 32},
    "sliding window": {**SLIDING, "hidden_size": 256, "head_dim": 64},
}
TEXTS = [list(range(5, 60)), [3, 1, 4, 1, 5], [9, 2, 6, *range(100, 140)], [7]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are called."""
    yield cuda_kernels.stand_in(monkeypatch)
    monkeypatch.undo()
    cuda_kernels.forget()


def alike(got: mx.array, wanted: mx.array, share: float = 1.0) -> bool:
    """But for rounding, in at least this share of the tokens."""
    one, other = (np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1]) for array in (got, wanted))
    errors = np.linalg.norm(one - other, axis=-1) / np.linalg.norm(other, axis=-1)
    return bool(np.mean(errors <= TOLERANCES[wanted.dtype]) >= share)


def opened(config: dict[str, Any], dtype: mx.Dtype, bits: int = 0) -> tuple[Any, Any]:
    """The same model on MLX's operations and on `CudaOps`."""
    model = build_model(config)
    model.set_dtype(dtype)
    if bits:
        quantize(model, group_size=64, bits=bits)
    weights = read_weights(model)
    ops = CudaOps()
    for linear in [weights.head, *(part for layer in weights.layers for part in (*layer.qkv, layer.out))]:
        choose(ops, linear)
    for layer in weights.layers:
        for part in (*layer.mlp.gate_up, layer.mlp.down) if not hasattr(layer.mlp, "router") else ():
            choose(ops, part)
    return DecoderModel(weights, PlainOps(QUANTISED_ROWS_MAX)), DecoderModel(weights, ops)


def choose(ops: CudaOps, linear: Any) -> None:
    """The variant with the least of MLX in it for each number of rows."""
    rows = [1, *ops.measured_rows(linear), 1 << 20]
    ops.choose(linear, {count: list(ops.variants(linear, count))[-1] for count in rows})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
def test_every_kernel_is_given_what_it_takes(kernels: list[str], name: str, dtype: mx.Dtype) -> None:
    """Prompts, steps and verify blocks; the second step of a batch is written in place."""
    # MLX gathers experts in half precision on a GPU only, packed ones everywhere.
    bits = 4 if name == "experts" and dtype == mx.float16 else 0
    # A rounding may tip an expert, or where a token looks; what is driven wrongly is wrong for most of them.
    share = 0.6 if dtype == mx.float16 else 1.0
    plain, tuned = opened(CONFIGS[name], dtype, bits)
    widths = [1, 1, 3, 1, 8, 1, 12, 1] if name != "sliding window" else [1, 1, 1]
    wanted = steps(plain, widths, TEXTS)
    assert not kernels
    for got, expected in zip(steps(tuned, widths, TEXTS), wanted, strict=True):
        assert alike(got, expected, share)
    own = {"residual_norm"}
    if dtype == mx.float16:
        own |= {"quantised_product" if bits else "plain_product"}
    if name not in ("yarn rope", "traditional rope", "small heads"):
        own.add("rotary_heads")
        if len(widths) > 3:
            own |= {"rotary_heads_into", "window_attention" if dtype == mx.float16 else "ragged_attention"}
    assert own <= set(kernels)


def test_experts_in_half_precision_go_through_their_kernels(kernels: list[str]) -> None:
    """MLX has no such products on a CPU: the reference is in float32."""
    texts = [list(range(1, 70)), [1, 2, 3]]
    plain, _ = opened(CONFIGS["experts"], mx.float32)
    wanted = steps(plain, [1, 2], texts)
    assert not kernels
    _, tuned = opened(CONFIGS["experts"], mx.float16)
    for got, expected in zip(steps(tuned, [1, 2], texts), wanted, strict=True):
        assert alike(got, expected.astype(mx.float16), 0.6)
    layers = sum(isinstance(layer.mlp, Experts) for layer in tuned.layers)
    # Two prompts and two steps.
    assert kernels.count("experts_route") == kernels.count("experts_sum") == 4 * layers
    assert kernels.count("experts_product") == 8 * layers


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_go_through_their_kernel(kernels: list[str], bits: int) -> None:
    """Up to 64 rows; more are multiplied in full width."""
    plain, tuned = opened(WIDE, mx.float16, bits)
    texts = [list(range(1, 70)), [1, 2, 3]]
    for got, expected in zip(steps(tuned, [1, 2], texts), steps(plain, [1, 2], texts), strict=True):
        assert alike(got, expected)
    assert kernels.count("quantised_product") > 10
    ops = CudaOps()
    linear = plain.weights.layers[0].out
    assert [ops.unmeasured(linear, rows) for rows in (1, 2, 64, 65)] == [
        "product",
        "kernel",
        "kernel",
        "dequantised",
    ]


def test_a_packed_step_on_kernels(kernels: list[str]) -> None:
    """Rows in decode and prompts beside them are written in place, from the second turn on by two kernels a layer."""
    plain, tuned = opened(WIDE, mx.float16)
    kernels.clear()
    found = []
    for model in (plain, tuned):
        alone = [kv.new_caches(model) for _ in range(4)]
        for caches, text in zip(alone, TEXTS, strict=True):
            mx.eval(kv.prefill_row(model, caches, text))
        batch = kv.KVBatch.merge(alone[:2], list(map(len, TEXTS[:2])))
        for turn in range(3):
            rows = mx.array([[8 + turn], [9 + turn]])
            segments = [
                Segment(rows, batch.begin_step(rows)),
                Segment(kv.begin_row_prefill(alone[2], list(range(50, 70 + turn))), alone[2]),
                Segment(kv.begin_row_prefill(alone[3], [4, 5, 6]), alone[3]),
            ]
            found.append(model.packed(segments))
            batch.launch(found[-1], kv.arrays([*alone[2], *alone[3]]))
    for one, other in zip(found[:3], found[3:], strict=True):
        for got, expected in zip(other, one, strict=True):
            assert alike(got, expected)
    layers = len(tuned.layers)
    # Four prompts alone, and two beside the first step of the batch, which MLX writes.
    assert kernels.count("rotary_heads_into") == layers * (4 + 2)
    attends = kernels.count("packed_attention") + kernels.count("packed_attention_part")
    assert kernels.count("rotary_heads_packed") == attends == layers * 2
    # For each row once: there is room for what follows.
    assert kernels.count("new_arrays") == 4
    assert kernels.count("move_rows") == 0
