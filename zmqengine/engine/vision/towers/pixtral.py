"""Pixtral's tower, and the projections of Pixtral and of Mistral Small 3, which merges patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.arrays import Weights, activation
from zmqengine.engine.vision.towers.block import BlockShape, TowerBlock, axes_rotation
from zmqengine.engine.vision.towers.layered import Grid
from zmqengine.engine.vision.towers.parts import merge_cells, patch_weights

PREFIXES = ("vision_tower.", "multi_modal_projector.", "vision_encoder.")
_TOWER = r"(?:vision_tower|vision_encoder)\.(?:vision_model\.)?"
_LAYER = _TOWER + r"transformer\.layers\.(\d+)\."
RULES = (
    (_TOWER + r"patch_conv\.weight", r"patch.weight"),
    (_TOWER + r"ln_pre\.weight", r"before.weight"),
    (_LAYER + r"attention_norm\.weight", r"layers.\1.norm1.weight"),
    (_LAYER + r"ffn_norm\.weight", r"layers.\1.norm2.weight"),
    (_LAYER + r"attention\.([qkv])_proj\.(\w+)", r"layers.\1.\2.\3"),
    (_LAYER + r"attention\.o_proj\.(\w+)", r"layers.\1.out.\2"),
    (_LAYER + r"feed_forward\.(gate|up|down)_proj\.(\w+)", r"layers.\1.\2.\3"),
    (r"multi_modal_projector\.norm\.weight", r"norm.weight"),
    (r"multi_modal_projector\.patch_merger\.merging_layer\.(\w+)", r"merging.\1"),
    (r"multi_modal_projector\.linear_(\d)\.(\w+)", r"linear\1.\2"),
)


class Pixtral(Module):
    """The encoder of a config of `pixtral`, `llava` with Pixtral's tower, or `mistral3`."""

    deep_layers: Sequence[int] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        vision, text = config["vision_config"], config["text_config"]
        width, heads = int(vision["hidden_size"]), int(vision["num_attention_heads"])
        shape = BlockShape(
            width, heads, int(vision["intermediate_size"]), norm="rms", eps=1e-5, qkv_bias=False, bias=False,
            gated=True, activation=vision.get("hidden_act", "silu"),
        )  # fmt: skip
        patch = int(vision["patch_size"])
        self.patch = Linear(3 * patch**2, width, bias=False)
        self.before = RMSNorm(width, eps=1e-5)
        self.layers = [TowerBlock(shape) for _ in range(vision["num_hidden_layers"])]
        self.width = int(text["hidden_size"])
        self.token_floats = shape.token_floats(patch)
        self.merge, self.extra_tokens = merge_of(config), 0
        bias = bool(config.get("multimodal_projector_bias", config["model_type"] != "mistral3"))
        if config["model_type"] == "mistral3":
            self.norm = RMSNorm(width, eps=float(text.get("rms_norm_eps", 1e-6)))
            self.merging = Linear(width * self.merge**2, width, bias=False)
        self.linear1 = Linear(width, self.width, bias=bias)
        self.linear2 = Linear(self.width, self.width, bias=bias)
        self._activation = activation(config.get("projector_hidden_act", "gelu"))
        # Frequencies of a rotation of the whole head: rows take every second one, columns the others.
        base, dim = rotary_base(vision), width // heads
        freqs = base ** (-mx.arange(0, dim, 2, dtype=mx.float32) / dim)
        self._freqs = (freqs[0::2], freqs[1::2])

    def start(self, embedded: mx.array, grid: Grid) -> mx.array:
        """Embedded patches, normalised."""
        states: mx.array = self.before(embedded)
        return states

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """The rotation, alike in all layers."""
        options = {"rotation": axes_rotation(grid, *self._freqs)}
        return lambda number: options

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """Projected states; those of Mistral Small 3 are merged before."""
        if self.merge > 1 or "merging" in self:
            states = self.merging(merge_cells(self.norm(states), grid, self.merge, channels_first=True))
        features: mx.array = self.linear2(self._activation(self.linear1(states)))
        return features

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """None of its layers has features of its own."""
        raise NotImplementedError


def merge_of(config: dict[str, Any]) -> int:
    """Patches a side that become one token."""
    return int(config.get("spatial_merge_size", 2)) if config["model_type"] == "mistral3" else 1


def rotary_base(vision: dict[str, Any]) -> float:
    """The base of the rotary positions, where older and newer checkpoints name it."""
    named = vision.get("rope_parameters") or {}
    return float(named.get("rope_theta") or vision.get("rope_theta") or 10_000.0)


def arrays(found: Weights, config: dict[str, Any]) -> Weights:
    """The arrays by our names, made to fit products."""
    return {**found, "patch.weight": patch_weights(found["patch.weight"])}
