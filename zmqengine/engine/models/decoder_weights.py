"""Weights of the decoder family, read from the model that mlx-lm has loaded.

Products with the same input are joined: queries, keys and values, and the two halves of a gated MLP. A device reads one
wide matrix faster than several narrow ones. mlx-lm's modules get views of the joined arrays, so its model can still run
and needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from zmqengine.engine.models.mlx_lm import (
    Llama3RoPE,
    ProportionalRoPE,
    QuantizedSwitchLinear,
    SuScaledRoPE,
    SwitchLinear,
    YarnRoPE,
)

# Modules of mlx-lm that define this family. mlx-lm loads Mistral as a Llama.
_FAMILY = ("llama", "qwen2", "qwen3", "qwen3_moe")
_PLAIN = (LinearModule, Embedding, SwitchLinear)
_QUANTISED = (QuantizedLinear, QuantizedEmbedding, QuantizedSwitchLinear)


class NotOfTheFamily(Exception):
    """The decoder does not support a part of the model; mlx-lm's own code runs it."""


class Linear(NamedTuple):
    """Weights [outputs, inputs], or [experts, outputs, inputs]; with `bits` they are quantised, and have `scales`.

    `transposed`: a view of the weights as a product needs it; None for quantised ones.
    """

    weight: mx.array
    transposed: mx.array | None = None
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    mode: str = ""

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
        """The type of the dequantised weights."""
        return self.weight.dtype if self.scales is None else self.scales.dtype


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
    """Shape of queries, keys and values: `heads` and `key_heads` of `dim` dimensions; norms and rotation before
    attention.

    Scores are multiplied by `scale`. With a `window` a token sees that number of columns, its own included.
    """

    heads: int
    key_heads: int
    dim: int
    scale: float
    rotation: RotaryEmbedding
    norms: QueryKeyNorms | None
    window: int | None
    dtype: mx.Dtype


class Gated(NamedTuple):
    """A gated MLP. `gate_up`: one joined product for both halves, or two."""

    gate_up: tuple[Linear, ...]
    down: Linear


class Experts(NamedTuple):
    """A mixture of gated MLPs: `router` chooses `per_token` of them; their weights add up to 1 if `normalised`."""

    router: Linear
    gate_up: tuple[Linear, ...]
    down: Linear
    per_token: int
    normalised: bool


class Layer(NamedTuple):
    """A decoder layer. `qkv`: one joined product for queries, keys and values, or three."""

    input_norm: Norm
    qkv: tuple[Linear, ...]
    heads: HeadShape
    out: Linear
    mlp_norm: Norm
    mlp: Gated | Experts


class DecoderWeights(NamedTuple):
    """All weights of a model. A tied `head` has the arrays of the `embedding`."""

    embedding: Linear
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear


def read_weights(model: Any, *, in_columns: bool = False) -> DecoderWeights:
    """The weights of a model of mlx-lm, whose modules keep views of them. Raises NotOfTheFamily.

    For a model with images: those of its `language_model`. `in_columns`: the weights of an output become a column in
    memory, except in embeddings and mixtures of experts.
    """
    model = getattr(model, "language_model", model)
    package, _, name = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in _FAMILY:
        raise NotOfTheFamily(f"{name} is another architecture")
    inner = model.model
    _expect(inner, "embed_tokens", "layers", "norm")
    _expect(model, "model", *(() if model.args.tie_word_embeddings else ("lm_head",)))
    # Check all parts before the first is changed.
    for layer in inner.layers:
        _check_layer(layer)
    head = inner.embed_tokens if model.args.tie_word_embeddings else model.lm_head
    if in_columns and not model.args.tie_word_embeddings:
        _put_in_columns(head)
    layers = tuple(
        _layer(layer, getattr(inner, "sliding_window", None), in_columns=in_columns) for layer in inner.layers
    )
    # While weights were joined they were in memory twice.
    mx.clear_cache()
    return DecoderWeights(linear_of(inner.embed_tokens), layers, _norm(inner.norm), linear_of(head))


def _check_layer(layer: Any) -> None:
    _expect(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    attention, mlp = layer.self_attn, layer.mlp
    norms = ("q_norm", "k_norm") if "q_norm" in attention else ()
    _expect(attention, "q_proj", "k_proj", "v_proj", "o_proj", "rope", *norms)
    if len({attention[name].eps for name in norms}) > 1:
        raise NotOfTheFamily("norms of queries and keys differ")
    _rotation(attention.rope)
    experts = mlp
    if "switch_mlp" in mlp:
        _expect(mlp, "gate", "switch_mlp")
        if mlp.sharding_group is not None:
            raise NotOfTheFamily("experts are on several machines")
        experts = mlp.switch_mlp
        _expect(experts, "gate_proj", "up_proj", "down_proj", optional=["activation"])
    else:
        _expect(mlp, "gate_proj", "up_proj", "down_proj")
    parts = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    parts += [experts[name] for name in ("gate_proj", "up_proj", "down_proj")]
    for part in [*parts, *([mlp.gate] if experts is not mlp else [])]:
        if type(part) not in (*_PLAIN, *_QUANTISED) or getattr(part, "global_scale", None) is not None:
            raise NotOfTheFamily(f"a product is a {type(part).__name__}")


def _expect(module: Any, *names: str, optional: Sequence[str] = ()) -> None:
    found = {name for name, part in module.items() if _is_part(part)} - set(optional)
    if found != set(names):
        raise NotOfTheFamily(
            f"{type(module).__name__} has other parts: {', '.join(sorted(found ^ set(names)))}"
        )


def _is_part(value: Any) -> bool:
    return isinstance(value, (Module, mx.array)) or (isinstance(value, list) and any(map(_is_part, value)))


def _layer(layer: Any, window: int | None, *, in_columns: bool) -> Layer:
    attention = layer.self_attn
    if in_columns:
        _put_in_columns(attention.o_proj)
    heads, key_heads = attention.n_heads, attention.n_kv_heads
    dim = linear_of(attention.q_proj).outputs // heads
    norms = None
    if "q_norm" in attention:
        queries, keys = attention.q_norm.weight, attention.k_norm.weight
        both = mx.concatenate([mx.tile(queries, (heads, 1)), mx.tile(keys, (key_heads, 1))])
        mx.eval(both)
        norms = QueryKeyNorms(queries, keys, both, attention.q_norm.eps)
    return Layer(
        _norm(layer.input_layernorm),
        _joined([attention.q_proj, attention.k_proj, attention.v_proj], in_columns=in_columns),
        HeadShape(
            heads,
            key_heads,
            dim,
            attention.scale,
            _rotation(attention.rope),
            norms,
            window if getattr(layer, "use_sliding", False) else None,
            layer.input_layernorm.weight.dtype,
        ),
        linear_of(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _experts(layer.mlp) if "switch_mlp" in layer.mlp else _gated(layer.mlp, in_columns=in_columns),
    )


def _gated(mlp: Any, *, in_columns: bool = False) -> Gated:
    if in_columns:
        _put_in_columns(mlp.down_proj)
    return Gated(_joined([mlp.gate_proj, mlp.up_proj], in_columns=in_columns), linear_of(mlp.down_proj))


def _experts(mlp: Any) -> Experts:
    found = _gated(mlp.switch_mlp)
    return Experts(linear_of(mlp.gate), found.gate_up, found.down, mlp.top_k, mlp.norm_topk_prob)


def _norm(module: Any) -> Norm:
    if type(module) is not RMSNorm:
        raise NotOfTheFamily(f"a norm is a {type(module).__name__}")
    return Norm(module.weight, module.eps)


def _rotation(rope: Any) -> RotaryEmbedding:
    kind = type(rope)
    if kind is RoPE:
        return RotaryEmbedding(rope.dims, rope.traditional, rope.base, rope.scale, None, 1.0)
    if kind in (Llama3RoPE, ProportionalRoPE):
        return RotaryEmbedding(rope.dims, rope.traditional, None, 1.0, rope._freqs, 1.0)
    if kind is YarnRoPE:
        return RotaryEmbedding(rope.dims, rope.traditional, None, 1.0, rope._freqs, rope.mscale)
    if kind is SuScaledRoPE:
        return RotaryEmbedding(rope.dim, False, None, 1.0, rope._freqs, rope._scale)
    # DynamicNTKScalingRoPE: its base depends on the length of each row.
    raise NotOfTheFamily(f"positions are a {kind.__name__}")


def _joined(modules: Sequence[Any], *, in_columns: bool) -> tuple[Linear, ...]:
    """Join products whose weights have equal form; their modules get views of the joined arrays."""
    parts = [linear_of(module) for module in modules]
    if len({_likeness(part) for part in parts}) > 1:
        return tuple(parts)
    ends = [sum(part.outputs for part in parts[:count]) for count in range(1, len(parts) + 1)]
    arrays = {
        # A bias has no axis of inputs.
        name: mx.concatenate([module[name] for module in modules], axis=-1 if name == "bias" else -2)
        for name in ("weight", "scales", "biases", "bias")
        if modules[0].get(name) is not None
    }
    if in_columns and not parts[0].bits:
        arrays["weight"] = _columns(arrays["weight"])
    mx.eval(arrays)
    for module, part, end in zip(modules, parts, ends, strict=True):
        for name, array in arrays.items():
            own = slice(end - part.outputs, end)
            module[name] = array[..., own] if name == "bias" else array[..., own, :]
            mx.eval(module[name])
    first = parts[0]
    return (_with_view(Linear(bits=first.bits, group_size=first.group_size, mode=first.mode, **arrays)),)


def _put_in_columns(module: Any) -> None:
    """Store the weights of a module that are not quantised so that those of an output are a column."""
    if type(module) not in _QUANTISED:
        module["weight"] = _columns(module["weight"])
        mx.eval(module["weight"])


def _columns(weight: mx.array) -> mx.array:
    return mx.contiguous(weight.swapaxes(-1, -2)).swapaxes(-1, -2)


def _likeness(part: Linear) -> object:
    """Form that products must share to be joined: everything but the number of outputs."""
    *experts, _, inputs = part.weight.shape
    packing = part.bits, part.group_size, part.mode, part.biases is None
    return tuple(experts), inputs, part.weight.dtype, part.dtype, packing, part.bias is None


def linear_of(module: Any) -> Linear:
    """The weights of one of mlx-lm's products or embeddings."""
    if type(module) not in _QUANTISED:
        return _with_view(Linear(module["weight"], bias=module.get("bias")))
    return Linear(
        module["weight"],
        None,
        module["scales"],
        module.get("biases"),
        module.get("bias"),
        module.bits,
        module.group_size,
        module.mode,
    )


def _with_view(linear: Linear) -> Linear:
    # One view for all steps, instead of a new one in each.
    if linear.bits:
        return linear
    transposed = linear.weight.swapaxes(-1, -2)
    mx.eval(transposed)
    return linear._replace(transposed=transposed)
