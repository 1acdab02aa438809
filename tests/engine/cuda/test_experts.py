"""Experts of tokens are chosen, asked and summed up as NumPy does it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels
from zmqengine.engine.cuda import experts
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.models.layers import Experts, Linear, Router
from zmqengine.engine.models.ops import PlainOps

DIM, INNER = 128, 128
GROUP = 32

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels_as_written")]


def mixture_of(
    count: int, per_token: int, *, dtype: mx.Dtype = mx.bfloat16, bits: int = 0, mode: str = "affine",
    biased: bool = False, activation: str = "silu", **router: Any,
) -> Experts:  # fmt: skip
    def weights(*shape: int, seed: int) -> Linear:
        wide = (mx.random.normal(shape, key=mx.random.key(seed)) * 0.1).astype(dtype)
        bias = mx.random.normal(shape[:-1], key=mx.random.key(seed + 10)).astype(dtype) if biased else None
        if not bits:
            return Linear(wide, wide.swapaxes(-1, -2), bias=bias)
        return cuda_kernels.quantised(wide, bits, GROUP, mode, bias)

    router.setdefault("normalised", True)
    return Experts(
        Router(Linear(mx.zeros((count, DIM), dtype)), per_token, **router),
        (weights(count, 2 * INNER, DIM, seed=2),),
        weights(count, DIM, INNER, seed=3),
        activation,
    )


def inputs_of(tokens: int, count: int, dtype: mx.Dtype = mx.bfloat16) -> tuple[mx.array, mx.array]:
    """Hidden states, and logits by which some experts have many tokens and some have none."""
    states = mx.random.normal((tokens, DIM), key=mx.random.key(tokens)).astype(dtype)
    logits = mx.random.normal((tokens, count), key=mx.random.key(tokens + 1)) * 2
    return states, (logits - 3 * mx.arange(count) / count).astype(dtype)


def wanted(states: mx.array, logits: mx.array, mlp: Experts) -> np.ndarray:
    """By NumPy, from the router's logits on."""
    router = mlp.router
    x, scores, gate_up, down = map(
        as_numpy, (states, logits, *(cuda_kernels.wide_of(one) for one in (*mlp.gate_up, mlp.down)))
    )
    biases = [None if one.bias is None else as_numpy(one.bias) for one in (*mlp.gate_up, mlp.down)]
    made = np.zeros_like(x)
    for token, row in enumerate(scores):
        shares = 1 / (1 + np.exp(-row)) if router.shares == "sigmoid" else np.exp(row - row.max())
        if router.shares == "softmax":
            shares = shares / shares.sum()
        ranks = shares if router.bias is None else shares + as_numpy(router.bias)
        chosen = np.argsort(-ranks, kind="stable")[: router.per_token]
        shares = shares[chosen]
        if router.normalised or router.shares == "chosen":
            shares = shares / shares.sum()
        shares = shares * (
            router.scale if isinstance(router.scale, float) else as_numpy(router.scale)[chosen]
        )
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = np.split(
                gate_up[expert] @ x[token] + (0 if biases[0] is None else biases[0][expert]), 2
            )
            outputs = down[expert] @ ACTIVATIONS[mlp.activation](gate, up)
            made[token] += share * (outputs + (0 if biases[1] is None else biases[1][expert]))
    return made


def gelu(gate: np.ndarray) -> np.ndarray:
    return gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


ACTIVATIONS = {
    "silu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "clamped silu": clamped,
}


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
@pytest.mark.parametrize(
    ("bits", "dtype", "mode"),
    [(4, mx.bfloat16, "affine"), (8, mx.float16, "affine"), (4, mx.bfloat16, "mxfp4")],
)
def test_tokens_get_their_quantised_experts(tokens: int, bits: int, dtype: mx.Dtype, mode: str) -> None:
    """The packed weights are read as they are."""
    mlp = mixture_of(5, 2, dtype=dtype, bits=bits, mode=mode)
    assert experts.supports(mlp)
    states, logits = inputs_of(tokens, 5, dtype)
    got, expected = as_numpy(experts.mixture(states, logits, mlp)), wanted(states, logits, mlp)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < (
        0.01 if dtype == mx.bfloat16 else 0.002
    )


FAMILIES: dict[str, dict[str, Any]] = {
    # The bias, in float32, changes who is chosen.
    "GLM-4.x": {
        "shares": "sigmoid", "scale": 2.5, "bias": mx.random.uniform(-0.6, 0.6, (40,), key=mx.random.key(5)),
    },
    "sigmoids": {"shares": "sigmoid", "normalised": False},
    "gpt_oss": {
        "shares": "chosen", "normalised": False, "biased": True, "activation": "clamped silu", "bits": 4,
        "mode": "mxfp4",
    },
    "Gemma 4": {
        "shares": "chosen", "activation": "gelu",
        "scale": mx.random.uniform(0.5, 2.0, (40,), key=mx.random.key(6)).astype(mx.bfloat16),
    },
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_choose_and_weigh_their_experts(tokens: int, name: str) -> None:
    """Each by its own router, biases and activation."""
    mlp = mixture_of(40, 4, **FAMILIES[name])
    assert experts.supports(mlp)
    states, logits = inputs_of(tokens, 40)
    got, expected = as_numpy(experts.mixture(3 * states, logits, mlp)), wanted(3 * states, logits, mlp)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_of_mlx_agree(name: str) -> None:
    """Also with enough pairs to be sorted; in float32 on a CPU, where MLX has no such products in half precision."""
    dtype = mx.bfloat16 if on_cuda() else mx.float32
    changes = {key: value for key, value in FAMILIES[name].items() if key not in ("bits", "mode")}
    mlp = mixture_of(40, 4, dtype=dtype, **changes)
    for tokens in (3, 40):
        states, logits = inputs_of(tokens, 40, dtype)
        got, expected = as_numpy(PlainOps().mixture(states, logits, mlp)), wanted(states, logits, mlp)
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
