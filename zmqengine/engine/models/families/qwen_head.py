"""The heads of Qwen3-Next and Qwen3.5 to 3.8, which mlx-lm drops: read into modules of mlx-lm's classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.draft_head import HeadWeights
from zmqengine.engine.models.families import qwen_next
from zmqengine.engine.models.families.reading import expect_products, linear_of, norm_of, quantise
from zmqengine.engine.models.layers import Unsupported

MODULES = qwen_next.MODULES
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)")


def read(model: Any, tensors: Mapping[str, mx.array], *, is_raw: bool) -> HeadWeights:
    """The weights of a head by its tensors, named within it. `is_raw`: norms are without their 1."""
    inner = model.model
    dtype: mx.Dtype = inner.norm.weight.dtype
    named = _stacked(_split(tensors))
    if is_raw:
        named = {name: array + 1 if _is_norm(name, array) else array for name, array in named.items()}
    named = {name: array.astype(dtype) if _is_float(array) else array for name, array in named.items()}
    head = _module(model, named)
    quantise(head, named)
    try:
        head.load_weights(list(named.items()), strict=True)
    except ValueError as error:
        raise Unsupported(f"the tensors of the head are others: {error}") from None
    mx.eval(head.parameters())
    (layer,) = head.layers
    expect_products(head.fc)
    return HeadWeights(
        norm_of(head.pre_fc_norm_embedding),
        norm_of(head.pre_fc_norm_hidden),
        linear_of(head.fc),
        qwen_next.read_layer(layer),
        norm_of(head.norm),
    )


def _module(model: Any, named: Mapping[str, mx.array]) -> Any:
    """A module for the head; its layer is as the model's layers with attention, dense or a mixture."""
    mixes = any(".switch_mlp." in name for name in named)
    layers = model.model.layers
    alike = (
        number
        for number, layer in enumerate(layers)
        if not layer.is_linear and ("switch_mlp" in layer.mlp) == mixes
    )
    if (number := next(alike, None)) is None:
        raise Unsupported("no layer of the model is as that of the head")
    dim, eps = model.args.hidden_size, model.args.rms_norm_eps
    head: Any = Module()  # type: ignore[no-untyped-call]
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = RMSNorm(dim, eps), RMSNorm(dim, eps)
    head.fc = LinearModule(2 * dim, dim, bias=False)
    head.layers = [type(layers[number])(model.args, number)]
    head.norm = RMSNorm(dim, eps)
    return head


def _split(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Tensors with the fused ones of all experts apart, under mlx-lm's names."""
    named: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = mx.split(array, 2, axis=-2)
            before = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            named |= {f"{before}gate_proj.weight": gate, f"{before}up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            named[name.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = array
        else:
            named[name] = array
    return named


def _stacked(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Tensors with those of each expert stacked, under mlx-lm's names."""
    named: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, array in tensors.items():
        if found := _EXPERT.fullmatch(name):
            before, number, product, kind = found.groups()
            stacked = f"{before.removesuffix('experts')}switch_mlp.{product}.{kind}"
            experts.setdefault(stacked, {})[int(number)] = array
        else:
            named[name] = array
    return named | {
        name: mx.stack([by_number[number] for number in sorted(by_number)])
        for name, by_number in experts.items()
    }


def _is_norm(name: str, array: mx.array) -> bool:
    return array.ndim == 1 and "norm" in name


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
