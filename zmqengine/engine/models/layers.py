"""Weights of the kinds of layers that families are made of.

Named tuples: a trace takes their arrays as arguments, and layers that differ only in the values of their arrays share
a trace (models/tree.py).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Unsupported(Exception):
    """Our decoder does not support a part of the model; mlx-lm's own code runs it."""


class Linear(NamedTuple):
    """Weights [outputs, inputs], or [experts, outputs, inputs]; with `bits` they are quantised, and have `scales`.

    `transposed`: a view of the weights as a product needs it; None for quantised ones. `down` [adapters, inputs, rank]
    and `up` [adapters, rank, outputs]: factors of what each adapter adds; the first ones are zeros. Those of experts
    are [adapters, experts, ...].
    """

    weight: mx.array
    transposed: mx.array | None = None
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    mode: str = ""
    down: mx.array | None = None
    up: mx.array | None = None

    @property
    def outputs(self) -> int:
        """Outputs for a token."""
        return self.weight.shape[-2]

    @property
    def inputs(self) -> int:
        """Inputs of a token."""
        return self.weight.shape[-1] * 32 // self.bits if self.bits else self.weight.shape[-1]

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the dequantised weights. Scales of other modes than "affine" are exponents."""
        if self.scales is None:
            return self.weight.dtype
        return self.scales.dtype if self.mode == "affine" else mx.bfloat16


class Norm(NamedTuple):
    """An RMS norm."""

    weight: mx.array
    eps: float


class RotaryEmbedding(NamedTuple):
    """Rotary embedding as arguments of `mx.fast.rope`; the rotated dimensions are multiplied by `factor` before."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None
    factor: float


class QueryKeyNorms(NamedTuple):
    """RMS norms of each head of queries and keys, [dim]; `both` are [heads + key heads, dim]."""

    queries: mx.array
    keys: mx.array
    both: mx.array
    eps: float


class HeadShape(NamedTuple):
    """Attention by softmax: `heads` of queries and `key_heads` of keys and values, of `dim` dimensions.

    Scores are multiplied by `scale`, and bounded by a `cap` (cap * tanh(score / cap)). With a `window` a token sees
    that number of columns, its own included. `rotation`: None where positions are not used. `value_eps`: of an RMS norm
    of values without weights. `sinks` [heads]: a logit of each head that joins the softmax and has no value.

    A joined product has queries, keys and values in this order. `gated`: each head's queries are followed by as many
    numbers of a gate. `keys_are_values`: values are keys before their norm. `reads_only`: neither keys nor values: the
    layer reads those of an earlier one. Values are the last `value_dims` numbers of keys, if given.
    """

    heads: int
    key_heads: int
    dim: int
    scale: float
    rotation: RotaryEmbedding | None
    norms: QueryKeyNorms | None
    window: int | None
    dtype: mx.Dtype
    cap: float | None = None
    value_eps: float | None = None
    sinks: mx.array | None = None
    gated: bool = False
    keys_are_values: bool = False
    reads_only: bool = False
    value_dims: int | None = None

    @property
    def outputs(self) -> int:
        """Numbers of a token that attention gives."""
        return self.heads * (self.value_dims or self.dim)


class Gated(NamedTuple):
    """A gated MLP: activation(gate) * up. `gate_up`: one joined product for both halves, or two."""

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: str = "silu"


class Router(NamedTuple):
    """The choice of `per_token` experts by the outputs of `linear`, and their shares of the output.

    `shares`: "softmax" over all experts; "chosen": over the chosen ones; "sigmoid" of each. `normalised`: the shares of
    the chosen ones add up to 1. `bias` [experts] is added for the choice only; `scale`: a factor of all shares, or
    [experts] one for each. Of `groups` of neighbours `groups_used` are chosen from, those whose `group_best` best
    experts have the largest sum.
    """

    linear: Linear
    per_token: int
    shares: str = "softmax"
    normalised: bool = False
    bias: mx.array | None = None
    scale: float | mx.array = 1.0
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2


class Experts(NamedTuple):
    """A mixture of gated MLPs. A `shared` one takes every token, its output times sigmoid(`shared_gate`) where there
    is one."""

    router: Router
    gate_up: tuple[Linear, ...]
    down: Linear
    activation: str = "silu"
    shared: Gated | None = None
    shared_gate: Linear | None = None
