"""The products of a decoder's layers that adapters change, by the names of mlx-lm's modules and of PEFT's.

Families have other names for the same product. Each is known here by one of them, that of most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from zmqengine.engine.models.families.gemma import GemmaLayer
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.families.qwen_next import QwenNextLayer
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear
from zmqengine.engine.models.recurrence import GatedDelta, ShortConvolution

AdaptableLayer = LlamaLayer | GemmaLayer | QwenNextLayer

_RENAMED = (
    # LFM2.
    (re.compile(r"^self_attn\.out_proj$"), "self_attn.o_proj"),
    (re.compile(r"^feed_forward\."), "mlp."),
    (re.compile(r"\bw1$"), "gate_proj"),
    (re.compile(r"\bw3$"), "up_proj"),
    (re.compile(r"\bw2$"), "down_proj"),
    # gpt_oss, and experts with names of their own.
    (re.compile(r"^mlp\.experts\."), "mlp.switch_mlp."),
    (re.compile(r"^mlp\.router$"), "mlp.gate"),
    # GLM-4.x.
    (re.compile(r"^mlp\.shared_experts\."), "mlp.shared_expert."),
)


def common_name(module: str) -> str:
    """The name of most families for a module."""
    for pattern, name in _RENAMED:
        module = pattern.sub(name, module)
    return module


class Edit(Protocol):
    """Replaces the products of a layer that have the same input, joined in one or apart."""

    def __call__(self, widths: Mapping[str, int], *linears: Linear) -> tuple[Linear, ...]:
        """The products of modules, by the number of outputs of each."""
        ...


def edited(layer: Any, edit: Edit) -> Any:
    """A layer whose products that an adapter may change went through `edit`."""
    if not isinstance(layer, AdaptableLayer):
        return layer
    widths, out = _mixer_names(layer)
    layer = layer._replace(
        inputs=edit(widths, *layer.inputs),
        out=_one(edit, out, layer.out),
        mlp=_edited_mlp(layer.mlp, edit, "mlp"),
    )
    if isinstance(layer, GemmaLayer):
        layer = _edited_gemma(layer, edit)
    return layer


def _mixer_names(layer: AdaptableLayer) -> tuple[dict[str, int], str]:
    """The modules whose products go into a mixer, with their outputs, and the one behind it."""
    mixer = layer.mixer
    if isinstance(mixer, ShortConvolution):
        return {"conv.in_proj": 3 * mixer.outputs}, "conv.out_proj"
    if isinstance(mixer, GatedDelta):
        shape, heads = mixer.shape, mixer.shape.value_heads
        widths = {"qkv": shape.channels, "z": shape.values, "b": heads, "a": heads}
        if isinstance(layer, QwenNextLayer) and layer.order is not None:
            widths = {"qkvz": shape.channels + shape.values, "ba": 2 * heads}
        return {
            f"linear_attn.in_proj_{name}": width for name, width in widths.items()
        }, "linear_attn.out_proj"
    assert isinstance(mixer, HeadShape), "layers mix by attention or a recurrence of these kinds"
    keys = mixer.key_heads * mixer.dim
    widths = {"self_attn.q_proj": mixer.heads * mixer.dim * (1 + mixer.gated)}
    if not mixer.reads_only:
        widths["self_attn.k_proj"] = keys
        if not mixer.keys_are_values:
            widths["self_attn.v_proj"] = keys
    return widths, "self_attn.o_proj"


def _edited_mlp(mlp: Gated | Experts, edit: Edit, name: str) -> Any:
    if isinstance(mlp, Gated):
        return _edited_gated(mlp, edit, name)
    mlp = _edited_experts(mlp, edit, f"{name}.gate", f"{name}.switch_mlp")
    if mlp.shared is not None:
        mlp = mlp._replace(shared=_edited_gated(mlp.shared, edit, f"{name}.shared_expert"))
    if mlp.shared_gate is not None:
        mlp = mlp._replace(shared_gate=_one(edit, f"{name}.shared_expert_gate", mlp.shared_gate))
    return mlp


def _edited_experts(mlp: Experts, edit: Edit, router: str, experts: str) -> Experts:
    """A mixture whose router and experts have these names."""
    gated = _edited_gated(Gated(mlp.gate_up, mlp.down), edit, experts)
    linear = _one(edit, router, mlp.router.linear)
    return mlp._replace(router=mlp.router._replace(linear=linear), gate_up=gated.gate_up, down=gated.down)


def _edited_gated(mlp: Gated, edit: Edit, name: str) -> Gated:
    half = sum(linear.outputs for linear in mlp.gate_up) // 2
    widths = {f"{name}.gate_proj": half, f"{name}.up_proj": half}
    return mlp._replace(gate_up=edit(widths, *mlp.gate_up), down=_one(edit, f"{name}.down_proj", mlp.down))


def _edited_gemma(layer: GemmaLayer, edit: Edit) -> GemmaLayer:
    """Gemma 4's experts beside the MLP, and the part of a layer that takes its own input."""
    if layer.experts is not None:
        experts = _edited_experts(layer.experts.experts, edit, "router.proj", "experts.switch_glu")
        layer = layer._replace(experts=layer.experts._replace(experts=experts))
    if layer.own is not None:
        own = layer.own._replace(
            gate=_one(edit, "per_layer_input_gate", layer.own.gate),
            projection=_one(edit, "per_layer_projection", layer.own.projection),
        )
        layer = layer._replace(own=own)
    return layer


def _one(edit: Edit, name: str, linear: Linear) -> Linear:
    (changed,) = edit({name: linear.outputs}, linear)
    return changed
