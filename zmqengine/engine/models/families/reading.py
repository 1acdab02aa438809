"""Reads weights out of mlx-lm's modules.

Products with the same input are joined: queries, keys and values, and the two halves of a gated MLP. A device reads one
wide matrix faster than several narrow ones. mlx-lm's modules get views of the joined arrays, so its model can still run
and needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize

from zmqengine.engine.models.architecture import DecoderLayer, DecoderWeights
from zmqengine.engine.models.layers import (
    Gated,
    Linear,
    Norm,
    QueryKeyNorms,
    RotaryEmbedding,
    Unsupported,
)
from zmqengine.engine.models.mlx_lm import (
    DeepseekYarnRoPE,
    Llama3RoPE,
    MultiLinear,
    ProportionalRoPE,
    QuantizedMultiLinear,
    QuantizedSwitchLinear,
    SuScaledRoPE,
    SwitchLinear,
    YarnRoPE,
)

_PLAIN = (LinearModule, Embedding, SwitchLinear, MultiLinear)
_QUANTISED = (QuantizedLinear, QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)
# Modes of quantised weights without biases, by bits and group size.
_MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}


def expect_parts(module: Any, *names: str, optional: Sequence[str] = ()) -> None:
    """Raise Unsupported unless the parts of a module are these and no others."""
    found = {name for name, part in module.items() if _is_part(part)} - set(optional)
    if found != set(names):
        raise Unsupported(f"{type(module).__name__} has other parts: {', '.join(sorted(found ^ set(names)))}")


def _is_part(value: Any) -> bool:
    return isinstance(value, (Module, mx.array)) or (isinstance(value, list) and any(map(_is_part, value)))


def expect_products(*modules: Any) -> None:
    """Raise Unsupported unless these are products that `linear_of` reads."""
    for module in modules:
        if type(module) not in (*_PLAIN, *_QUANTISED) or getattr(module, "global_scale", None) is not None:
            raise Unsupported(f"a product is a {type(module).__name__}")


def expect_experts(mlp: Any, *parts: str, optional: Sequence[str] = ()) -> Any:
    """The products of all experts of a mixture. Raises Unsupported unless it has a router, these parts and no others,
    on one machine."""
    expect_parts(mlp, "gate", "switch_mlp", *parts, optional=optional)
    if mlp.sharding_group is not None:
        raise Unsupported("experts are on several machines")
    return mlp.switch_mlp


_IN_COLUMNS = "zmqengine_in_columns"
"""Attribute of a module whose weights are stored in columns."""
_QKV = ("q_proj", "k_proj", "v_proj")


def expect_attention(attention: Any, *norms: str, out: str = "o_proj", others: Sequence[str] = ()) -> None:
    """Raise Unsupported unless attention has its four products, a rotation, and these norms and others."""
    expect_parts(attention, *_QKV, out, "rope", *norms, *others)
    expect_products(*(attention[name] for name in (*_QKV, out)))


def query_key_names(attention: Any) -> tuple[str, ...]:
    """The names of the norms of queries and keys in attention that may have them."""
    return ("q_norm", "k_norm") if "q_norm" in attention else ()


def qkv_of(attention: Any) -> tuple[Linear, ...]:
    """The joined product of queries, keys and values, or three."""
    return joined([attention[name] for name in _QKV])


def head_of(model: Any, *, is_tied: bool = False) -> Any:
    """The module of a model's vocabulary product, which may be its embedding.

    Raises Unsupported unless the model has the parts that most families have.
    """
    inner = model.model
    expect_parts(inner, "embed_tokens", "layers", "norm")
    expect_parts(model, "model", *(() if is_tied else ("lm_head",)))
    return inner.embed_tokens if is_tied else model.lm_head


def weights_of(model: Any, layers: Sequence[DecoderLayer], head: Any) -> DecoderWeights:
    """The weights of such a model."""
    inner = model.model
    return DecoderWeights(linear_of(inner.embed_tokens), tuple(layers), norm_of(inner.norm), linear_of(head))


def read_alike(
    model: Any,
    check: Callable[[Any], None],
    read_layer: Callable[[Any], DecoderLayer],
    *,
    is_tied: bool = False,
) -> DecoderWeights:
    """The weights of a model whose layers are read alike: all of them are checked before the first is changed."""
    head = head_of(model, is_tied=is_tied)
    for layer in model.model.layers:
        check(layer)
    return weights_of(model, list(map(read_layer, model.model.layers)), head)


def norm_of(module: Any) -> Norm:
    """An RMS norm."""
    if type(module) is not RMSNorm:
        raise Unsupported(f"a norm is a {type(module).__name__}")
    return Norm(module.weight, module.eps)


def query_key_norms(queries: Norm, keys: Norm, heads: int, key_heads: int) -> QueryKeyNorms:
    """The norms of the heads of queries and keys."""
    if queries.eps != keys.eps:
        raise Unsupported("norms of queries and keys differ")
    both = mx.concatenate([mx.tile(queries.weight, (heads, 1)), mx.tile(keys.weight, (key_heads, 1))])
    mx.eval(both)
    return QueryKeyNorms(queries.weight, keys.weight, both, queries.eps)


def rotation_of(rope: Any) -> RotaryEmbedding:
    """The rotation of queries and keys by their positions."""
    kind = type(rope)
    if kind is RoPE:
        return RotaryEmbedding(rope.dims, rope.traditional, rope.base, rope.scale, None, 1.0)
    if kind in (Llama3RoPE, ProportionalRoPE):
        return RotaryEmbedding(rope.dims, rope.traditional, None, 1.0, rope._freqs, 1.0)
    if kind is YarnRoPE:
        return RotaryEmbedding(rope.dims, rope.traditional, None, 1.0, rope._freqs, rope.mscale)
    if kind is DeepseekYarnRoPE:
        dims = 2 * rope._freqs.size
        return RotaryEmbedding(dims, True, None, 1.0, rope._freqs, rope.mscale)
    if kind is SuScaledRoPE:
        return RotaryEmbedding(rope.dim, False, None, 1.0, rope._freqs, rope._scale)
    # DynamicNTKScalingRoPE: its base depends on the length of each row.
    raise Unsupported(f"positions are a {kind.__name__}")


def gated_of(mlp: Any, activation: str = "silu") -> Gated:
    """A gated MLP, or those of all experts."""
    return Gated(joined([mlp.gate_proj, mlp.up_proj]), linear_of(mlp.down_proj), activation)


def joined(modules: Sequence[Any]) -> tuple[Linear, ...]:
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
    if all(getattr(module, _IN_COLUMNS, False) for module in modules):
        arrays["weight"] = _columns(arrays["weight"])
    mx.eval(arrays)
    for module, part, end in zip(modules, parts, ends, strict=True):
        for name, array in arrays.items():
            own = slice(end - part.outputs, end)
            module[name] = array[..., own] if name == "bias" else array[..., own, :]
            mx.eval(module[name])
    first = parts[0]
    return (with_view(Linear(bits=first.bits, group_size=first.group_size, mode=first.mode, **arrays)),)


def put_in_columns(model: Any) -> None:
    """Store the weights of products so that those of an output are a column, where they are not quantised.

    Those of an embedding too that is the product with the vocabulary. Not those of experts: MLX's products of sorted
    rows read such views wrongly (github.com/ml-explore/mlx/issues/4253).
    """
    modules = dict(model.named_modules())
    is_tied = not any(name.endswith("lm_head") for name in modules)
    for name, module in modules.items():
        is_head = is_tied and type(module) is Embedding and name.endswith("embed_tokens")
        if is_head or type(module) is LinearModule:
            module["weight"] = _columns(module["weight"])
            mx.eval(module["weight"])
            setattr(module, _IN_COLUMNS, True)


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
        return with_view(Linear(module["weight"], bias=module.get("bias")))
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


def with_view(linear: Linear) -> Linear:
    """Weights with the view that a product needs, if it needs one."""
    # One view for all steps, instead of a new one in each.
    if linear.bits:
        return linear
    transposed = linear.weight.swapaxes(-1, -2)
    mx.eval(transposed)
    return linear._replace(transposed=transposed)


def quantise(module: Any, named: Mapping[str, mx.array]) -> None:
    """Make the parts of a module quantised whose tensors are, by the shapes of these."""

    def packing(path: str, part: Any) -> Any:
        scales = named.get(f"{path}.scales")
        if scales is None or not hasattr(part, "to_quantized"):
            return False
        inputs = part.weight.shape[-1]
        bits = named[f"{path}.weight"].shape[-1] * 32 // inputs
        group_size = inputs // scales.shape[-1]
        mode = "affine" if f"{path}.biases" in named else _MODES.get((bits, group_size))
        if mode is None:
            raise Unsupported(f"weights of the head have {bits} bits in groups of {group_size}")
        return {"bits": bits, "group_size": group_size, "mode": mode}

    quantize(module, class_predicate=packing)


def floats_as(
    tensors: Mapping[str, mx.array], dtype: mx.Dtype, casts: Callable[[str], bool] = lambda name: True
) -> dict[str, mx.array]:
    """Tensors by name, of which those with floats have this type, unless `casts` leaves one as it is."""
    return {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and casts(name) else array
        for name, array in tensors.items()
    }


def load(
    module: Any,
    named: Mapping[str, mx.array],
    mismatch: str = "its tensors are others, or of a drafter for another model",
) -> None:
    """Load tensors into a module, which becomes quantised where they are. Raises Unsupported with `mismatch`."""
    quantise(module, named)
    try:
        module.load_weights(list(named.items()), strict=True)
    except ValueError as error:
        raise Unsupported(f"{mismatch}: {error}") from None
    mx.eval(module.parameters())
