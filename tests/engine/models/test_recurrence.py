"""Recurrent layers are mlx-lm's: token by token, in chunks, in pieces, padded, and behind rejected drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.lfm2 import ShortConv
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from zmqengine.engine.models import recurrence
from zmqengine.engine.models.recurrence import (
    CHUNK,
    CPU_CHUNK,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    convolved,
    delta_chunked,
    delta_layer,
    delta_steps,
    gated_norm,
    normalised,
    short_conv,
)

SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=32, value_dim=16, kernel=4, dtype=mx.float32)
HIDDEN = 48
# Sums of as many float32 products as a key has, in another order; bfloat16 has 8 bits.
TOLERANCES = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
BORDERS = [1, 2, 8, 9, CPU_CHUNK, CPU_CHUNK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 300]


def error(got: mx.array, wanted: mx.array) -> float:
    """The relative error; NaN if a number is NaN."""
    assert got.shape == wanted.shape
    one, other = (np.array(each.astype(mx.float32)) for each in (got, wanted))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@contextmanager
def not_compiled() -> Iterator[None]:
    """mlx-lm's functions are compiled for each shape, by a compiler for C++ that takes a second for one."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(params=[CPU_CHUNK, CHUNK], ids="chunks of {}".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a CPU, and those of a GPU."""
    monkeypatch.setattr(recurrence, "CPU_CHUNK", request.param)


class Tokens:
    """Heads and gates of random tokens, and a state before them."""

    def __init__(self, rows: int, width: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> None:
        self._random = np.random.default_rng(seed)
        heads = (rows, width, SHAPE.key_heads, SHAPE.key_dim)
        self.q, self.k = (each.astype(dtype) for each in normalised(self.normal(*heads), self.normal(*heads)))
        self.v = self.normal(rows, width, SHAPE.value_heads, SHAPE.value_dim).astype(dtype)
        size = (rows, width, SHAPE.value_heads)
        self.log_decay = -mx.array(self._random.exponential(0.2, size).astype(np.float32))
        self.beta = mx.array(self._random.uniform(0, 1, size).astype(np.float32)).astype(dtype)
        self.state = self.normal(rows, SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim)

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self._random.normal(size=shape).astype(np.float32))

    def between(self, start: int, end: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """What the functions take before the state."""
        part = slice(start, end)
        return self.q[:, part], self.k[:, part], self.v[:, part], self.log_decay[:, part], self.beta[:, part]

    def by_mlx_lm(self) -> tuple[mx.array, mx.array]:
        with not_compiled():
            return gated_delta_ops(self.q, self.k, self.v, mx.exp(self.log_decay), self.beta, self.state)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", BORDERS)
def test_the_rule_is_that_of_mlx_lm(chunks: None, width: int, dtype: mx.Dtype) -> None:
    """On both sides of the borders of chunks. The state is in float32, whatever the inputs are."""
    tokens = Tokens(2, width, seed=width, dtype=dtype)
    wanted = tokens.by_mlx_lm()
    for function in (delta_steps, delta_chunked):
        outputs, state = function(*tokens.between(0, width), tokens.state)
        assert (outputs.dtype, state.dtype) == (dtype, mx.float32)
        assert error(outputs, wanted[0]) < TOLERANCES[dtype]
        assert error(state, wanted[1]) < 1e-5


@pytest.mark.parametrize("decay", [0.0, -1e-4, -3.0, -90.0, -1e4])
@pytest.mark.parametrize("keys", ["alike", "apart"])
def test_chunks_are_exact_for_any_decay(chunks: None, decay: float, keys: str) -> None:
    """A series of powers would overflow for keys that are alike, and exp of a positive sum behind strong decays."""
    tokens = Tokens(1, 150, seed=1)
    if keys == "alike":
        tokens.k = mx.broadcast_to(tokens.k[:, :1], tokens.k.shape)
        tokens.beta = mx.ones(tokens.beta.shape)
    # Strong decays stand before weak ones, whose sums they must not round.
    strong = mx.arange(150)[None, :, None] % 50 == 7
    tokens.log_decay = mx.where(strong, decay, tokens.log_decay * (decay < 0))
    wanted = tokens.by_mlx_lm()
    got = delta_chunked(*tokens.between(0, 150), tokens.state)
    assert error(got[0], wanted[0]) < 1e-5
    assert error(got[1], wanted[1]) < 1e-5


def test_pieces_carry_the_state(chunks: None) -> None:
    """Whatever their lengths, and whichever of both functions computes one."""
    tokens = Tokens(2, 300, seed=4)
    wanted, wanted_state = tokens.by_mlx_lm()
    random = np.random.default_rng(5)
    state, outputs, start = tokens.state, [], 0
    while start < 300:
        end = min(300, start + int(random.choice([1, 3, 8, 20, 64, 90])))
        function = delta_steps if end - start <= 8 else delta_chunked
        found, state = function(*tokens.between(start, end), state)
        outputs.append(found)
        start = end
    assert error(mx.concatenate(outputs, axis=1), wanted) < 1e-5
    assert error(state, wanted_state) < 1e-5


class Layer:
    """A layer of mlx-lm with random weights, and ours with the same."""

    def __init__(self, dtype: mx.Dtype) -> None:
        mx.random.seed(7)
        config: Any = SimpleNamespace(
            hidden_size=HIDDEN,
            linear_num_value_heads=SHAPE.value_heads,
            linear_num_key_heads=SHAPE.key_heads,
            linear_key_head_dim=SHAPE.key_dim,
            linear_value_head_dim=SHAPE.value_dim,
            linear_conv_kernel_dim=SHAPE.kernel,
            rms_norm_eps=1e-6,
        )
        net = self.net = GatedDeltaNet(config)
        net.eval()
        net.dt_bias = mx.random.uniform(-2, 2, net.dt_bias.shape)
        net.norm.weight = mx.random.uniform(0.5, 2, net.norm.weight.shape)
        net.set_dtype(dtype)
        net.A_log = net.A_log.astype(mx.float32)
        self.shape = SHAPE._replace(dtype=dtype)
        self.weights = DeltaWeights(
            net.conv1d.weight[:, :, 0], net.A_log, net.dt_bias, net.norm.weight, net.norm.eps
        )
        self.dtype = dtype

    def hidden(self, rows: int, width: int) -> mx.array:
        return mx.random.normal((rows, width, HIDDEN)).astype(self.dtype)

    def product(self, hidden: mx.array) -> mx.array:
        net = self.net
        parts = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        product = mx.concatenate([part(hidden) for part in parts], axis=-1)
        assert product.shape[-1] == self.shape.outputs
        return product

    def by_mlx_lm(self, hidden: mx.array) -> tuple[mx.array, DeltaState]:
        cache = ArraysCache(2)
        with not_compiled():
            outputs = self.net(hidden, None, cache)
        return outputs, DeltaState(cache[0], cache[1])

    def new(self, rows: int) -> DeltaState:
        return DeltaState(*(mx.zeros((rows, *each.shape), each.dtype) for each in self.shape.state_shapes))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 8, 70])
def test_a_layer_is_that_of_mlx_lm(width: int, dtype: mx.Dtype) -> None:
    """Convolution, gates and norms too; a prompt in two pieces, then tokens."""
    layer = Layer(dtype)
    hidden = layer.hidden(2, 30 + width)
    wanted, wanted_rows = layer.by_mlx_lm(hidden)
    product = layer.product(hidden)
    first, rows = delta_layer(layer.shape, layer.weights, product[:, :30], layer.new(2))
    second, rows = delta_layer(layer.shape, layer.weights, product[:, 30:], rows)
    got = layer.net.out_proj(mx.concatenate([first, second], axis=1))
    assert got.dtype == dtype
    assert error(got, wanted) < TOLERANCES[dtype]
    assert error(rows.window, wanted_rows.window) < TOLERANCES[dtype]
    assert error(rows.state, wanted_rows.state) < TOLERANCES[dtype]
    sizes = [each.byte_count for each in layer.shape.state_shapes]
    assert [rows.window.nbytes, rows.state.nbytes] == [2 * size for size in sizes]


@pytest.mark.parametrize("counts", [[0, 1, 3, 8], [1, 2, 65, 90]])
def test_padding_changes_no_row(counts: list[int]) -> None:
    """Rows of unlike lengths in one call get what each gets alone, also where numbers of the padding are large."""
    layer = Layer(mx.float32)
    width, rows = max(counts), len(counts)
    # As after a prompt.
    _, before = delta_layer(
        layer.shape, layer.weights, layer.product(layer.hidden(rows, 20)), layer.new(rows)
    )
    product = layer.product(layer.hidden(rows, width) * 3)
    outputs, after = delta_layer(layer.shape, layer.weights, product, before, mx.array(counts))
    for row, count in enumerate(counts):
        own = DeltaState(before.window[row : row + 1], before.state[row : row + 1])
        if count:
            alone, own = delta_layer(layer.shape, layer.weights, product[row : row + 1, :count], own)
            assert error(outputs[row : row + 1, :count], alone) < 1e-5
        assert mx.array_equal(after.window[row : row + 1], own.window)
        assert error(after.state[row : row + 1], own.state) < 1e-5


def test_rejected_drafts_leave_nothing_behind() -> None:
    """State and window are to the last bit those of a row that never had a draft."""
    layer = Layer(mx.bfloat16)
    counts = [0, 1, 2, 5, 8]
    rows = len(counts)
    _, before = delta_layer(
        layer.shape, layer.weights, layer.product(layer.hidden(rows, 20)), layer.new(rows)
    )
    product = layer.product(layer.hidden(rows, 8))
    _, after = delta_layer(layer.shape, layer.weights, product, before, mx.array(counts))
    for row, count in enumerate(counts):
        own = DeltaState(before.window[row : row + 1], before.state[row : row + 1])
        for token in range(count):
            one = product[row : row + 1, token : token + 1]
            _, own = delta_layer(layer.shape, layer.weights, one, own)
        assert mx.array_equal(after.window[row : row + 1], own.window)
        assert mx.array_equal(after.state[row : row + 1], own.state)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_short_convolution_is_that_of_mlx_lm(dtype: mx.Dtype, bias: bool) -> None:
    """In pieces, and padded."""
    mx.random.seed(8)
    config: Any = SimpleNamespace(conv_L_cache=3, conv_bias=bias, hidden_size=HIDDEN)
    net = ShortConv(config, 0)
    net.set_dtype(dtype)
    hidden = mx.random.normal((2, 12, HIDDEN)).astype(dtype)
    cache = ArraysCache(1)
    wanted = net(hidden, None, cache)
    product = net.in_proj(hidden)
    weight = net.conv.weight[:, :, 0]
    added = net.conv.bias if bias else None
    window = mx.zeros((2, 2, HIDDEN), dtype)
    outputs = []
    for start, end, beyond in ((0, 1, 5), (1, 7, 12), (7, 12, 12)):
        counts = mx.array([end - start] * 2)
        made, window = short_conv(product[:, start:beyond], window, weight, added, counts)
        outputs.append(made[:, : end - start])
    assert error(net.out_proj(mx.concatenate(outputs, axis=1)), wanted) < TOLERANCES[dtype]
    assert error(window, cache[0]) < TOLERANCES[dtype]


def test_a_convolution_may_be_longer_than_its_inputs() -> None:
    """A row's first tokens see zeros before them."""
    inputs = mx.arange(1, 5, dtype=mx.float32).reshape(1, 4, 1)
    weight = mx.array([[1000.0, 100.0, 10.0, 1.0]])
    window = mx.zeros((1, 3, 1))
    found: list[Any] = []
    for token in range(4):
        made, window = convolved(window, inputs[:, token : token + 1], weight)
        found.append(made.item())
    assert found == [1, 12, 123, 1234]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_the_gate_is_not_rounded_before_the_product(dtype: mx.Dtype) -> None:
    """As mlx-lm has it: silu and the product in float32, and the weight in what the checkpoint has."""
    y = mx.random.normal((3, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    z = mx.random.normal((3, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    layer = Layer(mx.bfloat16)
    norm = type(layer.net.norm)(64, eps=1e-6)
    norm.weight = mx.random.uniform(0.5, 2, (64,)).astype(dtype)
    with not_compiled():
        wanted = norm(y, z)
    got = gated_norm(y, z, norm.weight, norm.eps)
    assert got.dtype == wanted.dtype == mx.bfloat16
    assert mx.array_equal(got, wanted)
