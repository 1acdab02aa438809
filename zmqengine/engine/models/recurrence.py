"""Recurrent layers: the gated delta rule of Qwen3-Next and Qwen3.5, and the short convolution of LFM2.

In place of keys and values a row has a window, the last inputs of a causal depthwise convolution, and, under the delta
rule, a state S [value_dim, key_dim] of each value head in float32. A token with log decay d and share beta does

    u = beta (v - exp(d) S k)        what its value adds to what S has for its key
    S = exp(d) S + u k^T
    y = S q

"Gated Delta Networks" (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464); mlx-lm's gated_delta.py and qwen3_5.py are the
reference for roundings. Rows of unlike lengths are padded on the right: a token with d = 0 and beta = 0 leaves S alone.
Everything here is documented MLX, for every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu

from zmqengine.engine.kv.slots import ArrayShape

STEPS_MAX = 8
"""Maximum tokens of a row that are computed one after the other; longer pieces are computed in chunks."""
CHUNK, CPU_CHUNK = 64, 16
"""Tokens of a chunk, powers of two. A CPU has few launches to save, and more to multiply in larger chunks."""
# Added to the sum of the squares of a query or a key, by every model of the family.
KEY_EPS = 1e-6
_fused = partial(mx.compile, shapeless=True)


class DeltaShape(NamedTuple):
    """Heads of a layer with the delta rule. `kernel`: width of its convolution; `dtype`: that of its inputs.

    `value_heads` is a multiple of `key_heads`: as many neighbouring value heads share a key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    dtype: mx.Dtype

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def outputs(self) -> int:
        """Outputs of the joined product of a layer: the channels, z, b and a."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def state_shapes(self) -> tuple[ArrayShape, ArrayShape]:
        """Window and state of a row."""
        return (
            ArrayShape((self.kernel - 1, self.channels), self.dtype),
            ArrayShape((self.value_heads, self.value_dim, self.key_dim), mx.float32),
        )


class DeltaWeights(NamedTuple):
    """Weights of a layer between its products: `conv` [channels, kernel], `a_log` and `dt_bias` [value_heads], and
    those of the gated norm [value_dim]."""

    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: float


class DeltaState(NamedTuple):
    """`window` [rows, kernel - 1, channels] and `state` [rows, value_heads, value_dim, key_dim] of rows."""

    window: mx.array
    state: mx.array


class GatedDelta(NamedTuple):
    """A layer with the delta rule, between its products: `RecurrentMixer`."""

    shape: DeltaShape
    weights: DeltaWeights

    @property
    def outputs(self) -> int:
        """See `RecurrentMixer`."""
        return self.shape.values

    @property
    def dtype(self) -> mx.Dtype:
        """See `RecurrentMixer`."""
        return self.shape.dtype

    @property
    def state_shapes(self) -> tuple[ArrayShape, ...]:
        """See `RecurrentMixer`."""
        return self.shape.state_shapes

    def advance(
        self, product: mx.array, states: Sequence[mx.array], counts: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """See `RecurrentMixer`."""
        outputs, after = delta_layer(self.shape, self.weights, product, DeltaState(*states), counts)
        return outputs, list(after)


class ShortConvolution(NamedTuple):
    """A short convolution between its products: `RecurrentMixer`. `weight` [channels, kernel]."""

    weight: mx.array
    bias: mx.array | None

    @property
    def outputs(self) -> int:
        """See `RecurrentMixer`."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> mx.Dtype:
        """See `RecurrentMixer`."""
        return self.weight.dtype

    @property
    def state_shapes(self) -> tuple[ArrayShape, ...]:
        """See `RecurrentMixer`."""
        channels, kernel = self.weight.shape
        return (ArrayShape((kernel - 1, channels), self.weight.dtype),)

    def advance(
        self, product: mx.array, states: Sequence[mx.array], counts: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """See `RecurrentMixer`."""
        outputs, window = short_conv(product, states[0], self.weight, self.bias, counts)
        return outputs, [window]


def delta_layer(
    shape: DeltaShape,
    weights: DeltaWeights,
    product: mx.array,
    before: DeltaState,
    counts: mx.array | None = None,
) -> tuple[mx.array, DeltaState]:
    """Outputs [rows, width, values] of a layer's joined `product` [rows, width, outputs], and the rows after their
    first `counts` [rows] tokens (all).

    The product has queries, keys and values, z, b and a, in that order.
    """
    rows, width, _ = product.shape
    channels, values, heads = shape.channels, shape.values, shape.value_heads
    inputs, z, b, a = mx.split(product, [channels, channels + values, channels + values + heads], axis=-1)
    mixed, window = convolved(before.window, inputs, weights.conv, counts, is_activated=True)
    q, k, v = mx.split(mixed, [shape.keys, 2 * shape.keys], axis=-1)
    q, k = normalised(*(each.reshape(rows, width, shape.key_heads, shape.key_dim) for each in (q, k)))
    v = v.reshape(rows, width, heads, shape.value_dim)
    log_decay, beta = _first(*gates(a, b, weights.a_log, weights.dt_bias), counts)
    delta = delta_steps if width <= STEPS_MAX else delta_chunked
    y, state = delta(q, k, v, log_decay, beta, before.state)
    normed = gated_norm(y, z.reshape(y.shape), weights.norm, weights.eps)
    return normed.reshape(rows, width, values), DeltaState(window, state)


def short_conv(
    product: mx.array,
    window: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    counts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """LFM2's layer between its products: C * conv(B * x) of a `product` [rows, width, 3 channels] of B, C and x.

    Also the window after the first `counts` [rows] tokens (all).
    """
    b, c, x = mx.split(product, 3, axis=-1)
    mixed, window = convolved(window, b * x, weight, counts)
    return c * (mixed if bias is None else mixed + bias), window


def convolved(
    window: mx.array,
    inputs: mx.array,
    weight: mx.array,
    counts: mx.array | None = None,
    *,
    is_activated: bool = False,
) -> tuple[mx.array, mx.array]:
    """The causal depthwise convolution of `inputs` [rows, width, channels] behind a `window`
    [rows, kernel - 1, channels], with a `weight` [channels, kernel]; silu of it if `is_activated`.

    Also the window after the first `counts` [rows] inputs (all).
    """
    width, kernel = inputs.shape[1], weight.shape[1]
    joined = mx.concatenate([window, inputs], axis=1)
    taps = [joined[:, tap : tap + width] for tap in range(kernel)]
    mixed = _sum_of_taps(taps, [weight[:, tap] for tap in range(kernel)]).astype(inputs.dtype)
    return silu(mixed) if is_activated else mixed, _window(joined, kernel - 1, counts)


def normalised(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """Queries and keys [..., key_dim] of length 1, queries over the root of `key_dim`."""
    scale = float(k.shape[-1] ** -0.5)
    eps = KEY_EPS * scale**2
    return scale**2 * mx.fast.rms_norm(q, None, eps), scale * mx.fast.rms_norm(k, None, eps)


def gates(a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    """Log decay, in float32 and at most 0, and beta of `a` and `b` [..., value_heads]."""
    softplus = mx.logaddexp(a + dt_bias, 0)
    return -mx.exp(a_log.astype(mx.float32)) * softplus, mx.sigmoid(b)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of `y` [..., value_dim] times silu of `z`."""
    return _gated(mx.fast.rms_norm(y, weight, eps), z)


def delta_steps(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs [rows, width, value_heads, value_dim] and the state behind them, token by token.

    `q`, `k` [rows, width, key_heads, key_dim] and `v` [rows, width, value_heads, value_dim]; `log_decay`, `beta`
    [rows, width, value_heads]; `state` [rows, value_heads, value_dim, key_dim]. A row gets the same state whatever
    padding follows.
    """
    key_heads, group = k.shape[2], v.shape[2] // k.shape[2]
    wide_k, wide_q = k.astype(mx.float32), q.astype(mx.float32)
    both = mx.stack([wide_k, wide_q], axis=-1)
    wide_k, meets = wide_k[:, :, :, None, None], (wide_k * wide_q).sum(axis=-1)[..., None, None]
    values = mx.unflatten(v.astype(mx.float32), 2, (key_heads, group))
    decay, share = (
        mx.unflatten(each[..., None], 2, (key_heads, group)) for each in (mx.exp(log_decay), beta)
    )
    now = mx.unflatten(state, 1, (key_heads, group))
    outputs = []
    for token in range(k.shape[1]):
        # The value heads of a key head in one product.
        read = mx.unflatten(now.flatten(2, 3) @ both[:, token], 2, (group, -1))
        g = decay[:, token]
        added, y = _token(read[..., 0], read[..., 1], values[:, token], g, share[:, token], meets[:, token])
        now = _with_token(now, g[..., None], added[..., None], wide_k[:, token])
        outputs.append(y)
    return mx.stack(outputs, axis=1).flatten(2, 3).astype(q.dtype), now.flatten(1, 2)


def delta_chunked(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`delta_steps` for many tokens: products within all chunks at once, then a loop that carries the state.

    Within a chunk the u solve (I + A) U = beta (V - exp(D) K S^T), with A_ts = beta_t exp(d_(s+1) + ... + d_t) k_s k_t
    for s < t: the WY form of section 3 of the paper. Each exponent is a sum of log decays, so none overflows.
    """
    width, key_heads = k.shape[1:3]
    size = CPU_CHUNK if mx.default_device() == mx.cpu else CHUNK
    wide = partial(_chunks, key_heads=key_heads, size=size)
    q32, k32, v32 = wide(q), wide(k), wide(v)
    decays, shares = wide(log_decay[..., None]), wide(beta[..., None])
    # [t, s]: d_(s+1) + ... + d_t, summed and not a difference of sums, which would cancel behind a strong decay.
    sees, sees_itself = mx.array(np.tri(size, k=-1, dtype=bool)), mx.array(np.tri(size, dtype=bool))
    apart = mx.exp(mx.cumsum(mx.where(sees, decays, 0), axis=-2))
    since = mx.exp(decays[..., :1, :]) * apart[..., :1]
    transposed = k32.swapaxes(-1, -2)
    inverse = _inverse(mx.where(sees, shares * apart * (k32 @ transposed), 0))
    solved = inverse @ mx.concatenate(
        [mx.broadcast_to(shares * since * k32, (*shares.shape[:-1], k32.shape[-1])), shares * v32], axis=-1
    )
    from_state, fresh = mx.split(solved, [k32.shape[-1]], axis=-1)
    reads = mx.concatenate([from_state, since * q32], axis=-2)
    kept = apart[..., -1:, :].swapaxes(-1, -2) * k32
    now = mx.unflatten(state, 1, (key_heads, -1))
    added, outputs = [], []
    for chunk in range(q32.shape[1]):
        read = reads[:, chunk] @ now.swapaxes(-1, -2)
        u = fresh[:, chunk] - read[..., :size, :]
        now = mx.addmm(now * since[:, chunk, ..., -1:, :], u.swapaxes(-1, -2), kept[:, chunk])
        added.append(u)
        outputs.append(read[..., size:, :])
    within = mx.where(sees_itself, apart * (q32 @ transposed), 0)
    y = mx.addmm(mx.stack(outputs, axis=1), within, mx.stack(added, axis=1))
    y = y.transpose(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :width]
    return y.astype(q.dtype), now.flatten(1, 2)


def _chunks(array: mx.array, key_heads: int, size: int) -> mx.array:
    """[rows, tokens, heads, numbers] as float32 [rows, chunks, key_heads, heads of each, size, numbers], with neutral
    tokens behind."""
    array = mx.pad(array.astype(mx.float32), [(0, 0), (0, -array.shape[1] % size), (0, 0), (0, 0)])
    apart = mx.unflatten(mx.unflatten(array, 2, (key_heads, -1)), 1, (-1, size))
    return apart.transpose(0, 1, 3, 4, 2, 5)


def _inverse(lower: mx.array) -> mx.array:
    """The inverse of I + `lower`, which is strictly lower triangular, [..., size, size].

    By blocks of 1, 2, 4, ... on the diagonal: of two neighbours with inverses P and R and M below the first, the
    inverse has -R M P there. Its intermediate results are parts of the result; powers of `lower`, with which a series
    does the same, overflow where keys are alike.
    """
    size = lower.shape[-1]
    # For blocks of 1, 2, 4, ...: where the second one of two neighbours sees the first, [levels, size, size].
    blocks = np.arange(size) >> np.arange(size.bit_length() - 1)[:, None]
    levels = mx.array((blocks[:, :, None] % 2 == 1) & (blocks[:, None, :] == blocks[:, :, None] - 1))
    inverse = mx.eye(size) - mx.where(levels[0], lower, 0)
    for level in levels[1:]:
        inverse = mx.addmm(inverse, inverse @ mx.where(level, lower, 0), inverse, alpha=-1.0)
    return inverse


def _first(log_decay: mx.array, beta: mx.array, counts: mx.array | None) -> tuple[mx.array, mx.array]:
    """Gates [rows, width, value_heads], with neutral ones behind the first `counts` tokens."""
    if counts is None:
        return log_decay, beta
    inside = (mx.arange(beta.shape[1]) < counts[:, None])[..., None]
    return mx.where(inside, log_decay, 0), mx.where(inside, beta, 0)


def _window(joined: mx.array, width: int, counts: mx.array | None) -> mx.array:
    """The `width` inputs before the end, or those up to input `counts` behind a window."""
    if counts is None:
        return mx.contiguous(joined[:, joined.shape[1] - width :])
    return mx.take_along_axis(joined, (counts[:, None] + mx.arange(width))[..., None], axis=1)


@_fused
def _sum_of_taps(taps: list[mx.array], weights: list[mx.array]) -> mx.array:
    found = taps[0].astype(mx.float32) * weights[0].astype(mx.float32)
    for tap, weight in zip(taps[1:], weights[1:], strict=True):
        found = found + tap.astype(mx.float32) * weight.astype(mx.float32)
    return found


@_fused
def _gated(normed: mx.array, z: mx.array) -> mx.array:
    made: mx.array = silu(z.astype(mx.float32)) * normed.astype(mx.float32)
    return made.astype(z.dtype)


@_fused
def _token(
    has: mx.array, read: mx.array, value: mx.array, decay: mx.array, beta: mx.array, meets: mx.array
) -> tuple[mx.array, mx.array]:
    """u and y of a token, given S k, S q and k q."""
    added = beta * (value - decay * has)
    return added, decay * read + meets * added


@_fused
def _with_token(state: mx.array, decay: mx.array, added: mx.array, key: mx.array) -> mx.array:
    return decay * state + added * key
