"""The heads of all families, which mlx-lm drops: read into modules of mlx-lm's classes, and out of these.

A head is one more decoder layer between two norms with a joining product and a last norm. A family's `HeadForm` says
how it names these, and in which order a token and a hidden state are joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.architecture import DecoderLayer
from zmqengine.engine.models.draft_head import HeadWeights
from zmqengine.engine.models.families.reading import expect_products, floats_as, linear_of, load, norm_of
from zmqengine.engine.models.layers import Unsupported

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)")
# Weights of a norm begin training as 1, and as 0 where the 1 is left out.
_HALF = 0.5


class HeadForm(NamedTuple):
    """The names of a family's head. `layer`: how those of the decoder layer begin; `read_layer` reads its module.

    `shared`: tensors that repeat the model's embedding and vocabulary product. `lacks_one`: published norms are
    without their 1, which mlx-lm adds where it converts. `numbered`: mlx-lm's class of a layer takes its number.
    """

    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    read_layer: Callable[[Any], DecoderLayer]
    layer: str = ""
    shared: tuple[str, ...] = ()
    hidden_first: bool = False
    lacks_one: bool = False
    numbered: bool = True


def read(model: Any, form: HeadForm, tensors: Mapping[str, mx.array]) -> HeadWeights:
    """The weights of a head by its tensors, named within it."""
    named = _stacked(_split(_renamed(form, tensors)))
    if form.lacks_one:
        named = _with_ones(named)
    dtype: mx.Dtype = model.model.norm.weight.dtype
    casts = getattr(model, "cast_predicate", lambda name: True)
    named = floats_as(named, dtype, casts)
    head = _module(model, form, named)
    load(head, named, "the tensors of the head are others")
    expect_products(head.join)
    return HeadWeights(
        norm_of(head.embedding_norm),
        norm_of(head.hidden_norm),
        linear_of(head.join),
        form.read_layer(head.layer),
        norm_of(head.norm),
        form.hidden_first,
    )


def _renamed(form: HeadForm, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors by the names of `_module`."""
    parts = {form.embedding_norm: "embedding_norm", form.hidden_norm: "hidden_norm"}
    parts |= {form.join: "join", form.norm: "norm"}
    named: dict[str, mx.array] = {}
    for name, array in tensors.items():
        part, _, kind = name.rpartition(".")
        if part in parts:
            named[f"{parts[part]}.{kind}"] = array
        elif not name.startswith(form.shared):
            named[f"layer.{name[len(form.layer) :]}" if name.startswith(form.layer) else name] = array
    return named


def _module(model: Any, form: HeadForm, named: Mapping[str, mx.array]) -> Any:
    """A module for the head; its layer is as the model's layers with attention, dense or a mixture."""
    mixes = any(".switch_mlp." in name for name in named)
    alike = (
        number
        for number, layer in enumerate(model.model.layers)
        if "self_attn" in layer and ("switch_mlp" in layer.mlp) == mixes
    )
    if (number := next(alike, None)) is None:
        raise Unsupported("no layer of the model is as that of the head")
    dim, eps = model.args.hidden_size, model.args.rms_norm_eps
    head: Any = Module()  # type: ignore[no-untyped-call]
    head.embedding_norm, head.hidden_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
    head.join = LinearModule(2 * dim, dim, bias=False)
    layer = type(model.model.layers[number])
    head.layer = layer(model.args, number) if form.numbered else layer(model.args)
    head.norm = RMSNorm(dim, eps)
    return head


def _with_ones(named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Norms with their 1, which whole groups of them may lack.

    What mlx-lm converts has it. A head that was taken out of a published model does not, and a conversion that keeps
    the head adds it in the layer alone, as no other name of a head is one of the model's.
    """
    added = dict(named)
    norms = [name for name, array in named.items() if array.ndim == 1 and "norm" in name]
    for is_inside in (True, False):
        group = [name for name in norms if name.startswith("layer.") == is_inside]
        if group and mx.median(mx.concatenate([named[name] for name in group])) < _HALF:
            added |= {name: named[name] + 1 for name in group}
    return added


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
