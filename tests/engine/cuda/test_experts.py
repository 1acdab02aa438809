"""Experts of tokens are chosen, asked and summed up as NumPy does it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels
from zmqengine.engine.cuda import experts
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.models.layers import Experts, Linear
from zmqengine.engine.models.ops import PlainOps

DIM, INNER = 128, 128
GROUP = 32

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels_as_written")]


def mixture_of(
    count: int, per_token: int, *, normalised: bool = True, dtype: mx.Dtype = mx.bfloat16, bits: int = 0
) -> Experts:
    def weights(*shape: int, seed: int) -> Linear:
        wide = (mx.random.normal(shape, key=mx.random.key(seed)) * 0.1).astype(dtype)
        if not bits:
            return Linear(wide)
        return cuda_kernels.quantised(wide, bits, GROUP)

    return Experts(
        weights(count, DIM, seed=1),
        (weights(count, 2 * INNER, DIM, seed=2),),
        weights(count, DIM, INNER, seed=3),
        per_token,
        normalised,
    )


def inputs_of(tokens: int, count: int, dtype: mx.Dtype = mx.bfloat16) -> tuple[mx.array, mx.array]:
    """Hidden states, and logits by which some experts have many tokens and some have none."""
    states = mx.random.normal((tokens, DIM), key=mx.random.key(tokens)).astype(dtype)
    logits = mx.random.normal((tokens, count), key=mx.random.key(tokens + 1)) * 2
    return states, (logits - 3 * mx.arange(count) / count).astype(dtype)


def wanted(states: mx.array, logits: mx.array, mlp: Experts) -> np.ndarray:
    weights = [cuda_kernels.wide_of(linear) for linear in (*mlp.gate_up, mlp.down)]
    x, scores, gate_up, down = map(as_numpy, (states, logits, *weights))
    made = np.zeros_like(x)
    for token, row in enumerate(scores):
        chosen = np.argsort(-row, kind="stable")[: mlp.per_token]
        shares = np.exp(row - row.max())
        shares = shares[chosen] / (shares[chosen] if mlp.router.normalised else shares).sum()
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            made[token] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return made


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize(
    ("count", "per_token", "normalised", "dtype"),
    [(8, 2, True, mx.bfloat16), (40, 8, False, mx.bfloat16), (3, 3, True, mx.float16)],
)
def test_tokens_get_their_experts(
    tokens: int, count: int, per_token: int, normalised: bool, dtype: mx.Dtype
) -> None:
    """With experts that have no token, and with those that have more than a tile."""
    mlp = mixture_of(count, per_token, normalised=normalised, dtype=dtype)
    states, logits = inputs_of(tokens, count, dtype)
    got, expected = as_numpy(experts.mixture(states, logits, mlp)), wanted(states, logits, mlp)
    # Two products and their inputs are rounded to the type, 8 or 11 bits.
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < (
        0.01 if dtype == mx.bfloat16 else 0.002
    )


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(("bits", "dtype"), [(4, mx.bfloat16), (8, mx.float16)])
def test_tokens_get_their_quantised_experts(tokens: int, bits: int, dtype: mx.Dtype) -> None:
    """The packed weights are read as they are."""
    mlp = mixture_of(5, 2, dtype=dtype, bits=bits)
    assert experts.supports(mlp)
    states, logits = inputs_of(tokens, 5, dtype)
    got, expected = as_numpy(experts.mixture(states, logits, mlp)), wanted(states, logits, mlp)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < (
        0.01 if dtype == mx.bfloat16 else 0.002
    )


def test_operations_of_mlx_agree() -> None:
    """Also with enough pairs to be sorted; in float32 on a CPU, where MLX has no such products in half precision."""
    dtype = mx.bfloat16 if on_cuda() else mx.float32
    mlp = mixture_of(12, 4, dtype=dtype)
    router, (gate_up,), down, per_token, normalised = mlp
    turned = (
        linear._replace(transposed=linear.weight.swapaxes(-1, -2)) for linear in (router, gate_up, down)
    )
    router, gate_up, down = turned
    mlp = Experts(router, (gate_up,), down, per_token, normalised)
    for tokens in (3, 40):
        states, _ = inputs_of(tokens, 12, dtype)
        got = as_numpy(PlainOps().mixture(states, mlp))
        expected = wanted(states, states @ router.weight.T, mlp)
        # Rounding may tip the choice of an expert.
        errors = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert np.median(errors) < (0.02 if dtype == mx.bfloat16 else 1e-5)


def test_a_token_gets_the_same_whoever_is_beside_it() -> None:
    """To the last bit, in every tiling."""
    mlp = mixture_of(4, 2)
    states, logits = inputs_of(150, 4)
    whole = as_numpy(experts.mixture(states, logits, mlp))
    for tokens in (1, 9, 20, 40, 90):
        found = as_numpy(experts.mixture(states[:tokens], logits[:tokens], mlp))
        np.testing.assert_array_equal(found, whole[:tokens])


def test_a_token_that_is_no_number_spoils_no_other() -> None:
    """NaN in its state and its logits: the others get what they get without it."""
    mlp = mixture_of(6, 2)
    states, logits = inputs_of(12, 6)
    expected = as_numpy(experts.mixture(states, logits, mlp))
    states[5], logits[5] = float("nan"), float("nan")
    got = as_numpy(experts.mixture(states, logits, mlp))
    assert np.isnan(got[5]).all()
    np.testing.assert_array_equal(np.delete(got, 5, axis=0), np.delete(expected, 5, axis=0))


def test_the_first_of_equal_logits_are_chosen() -> None:
    """Logits of padding are all equal."""
    mlp = mixture_of(40, 3)
    states, _ = inputs_of(2, 40)
    logits = mx.zeros((2, 40), mx.bfloat16)
    got, expected = as_numpy(experts.mixture(states, logits, mlp)), wanted(states, logits, mlp)
    np.testing.assert_allclose(got, expected, atol=0.02 * np.abs(expected).max())
