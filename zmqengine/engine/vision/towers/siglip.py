"""SigLIP's tower, as LFM2-VL, Idefics3 and SmolVLM have it, and their projections.

LFM2-VL samples the table of positions at the grid of each image (SigLIP 2, NaFlex); the others fill it with each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.models.arrays import Weights, activation
from zmqengine.engine.vision.towers.block import BlockShape, TowerBlock
from zmqengine.engine.vision.towers.layered import Grid
from zmqengine.engine.vision.towers.parts import merge_cells, patch_weights, resize_table

PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.", "connector.")
_TOWER = r"(?:vision_tower|vision_model)\.(?:vision_model\.)?"
_LAYER = _TOWER + r"encoder\.layers\.(\d+)\."
RULES = (
    (_TOWER + r"embeddings\.patch_embedding\.(\w+)", r"patch.\1"),
    (_TOWER + r"embeddings\.position_embedding\.weight", r"position"),
    (_TOWER + r"post_layernorm\.(\w+)", r"after.\1"),
    (_LAYER + r"layer_norm(\d)\.(\w+)", r"layers.\1.norm\2.\3"),
    (_LAYER + r"self_attn\.([qkv])_proj\.(\w+)", r"layers.\1.\2.\3"),
    (_LAYER + r"self_attn\.out_proj\.(\w+)", r"layers.\1.out.\2"),
    (_LAYER + r"mlp\.fc1\.(\w+)", r"layers.\1.up.\2"),
    (_LAYER + r"mlp\.fc2\.(\w+)", r"layers.\1.down.\2"),
    (r"multi_modal_projector\.layer_norm\.(\w+)", r"norm.\1"),
    (r"multi_modal_projector\.linear_(\d)\.(\w+)", r"linear\1.\2"),
    (r"connector\.modality_projection\.proj\.(\w+)", r"linear1.\1"),
)


class Siglip(Module):
    """The encoder of a config of `lfm2_vl`, `idefics3` or `smolvlm`."""

    deep_layers: Sequence[int] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        vision = config["vision_config"]
        is_lfm = is_lfm2(config)
        width = int(vision["hidden_size"])
        shape = BlockShape(
            width,
            int(vision["num_attention_heads"]),
            int(vision["intermediate_size"]),
            eps=float(vision.get("layer_norm_eps", 1e-6)),
            activation=vision.get("hidden_act", "gelu_pytorch_tanh"),
        )
        patch = int(vision["patch_size"])
        side = int(vision["num_patches"]) ** 0.5 if is_lfm else int(vision["image_size"]) // patch
        self.patch = Linear(3 * patch**2, width)
        self.position = mx.zeros((round(side) ** 2, width))
        self.layers = [TowerBlock(shape) for _ in range(vision["num_hidden_layers"])]
        self.after = LayerNorm(width, eps=shape.eps)
        self.width = int(config["text_config"]["hidden_size"])
        self.token_floats = shape.token_floats(patch)
        self.merge, self.extra_tokens = merge_of(config), 0
        self._resampled = is_lfm
        joined = width * self.merge**2
        if is_lfm:
            inner, bias = int(config["projector_hidden_size"]), bool(config.get("projector_bias", True))
            if config.get("projector_use_layernorm", True):
                self.norm = LayerNorm(joined)
            self.linear1 = Linear(joined, inner, bias=bias)
            self.linear2 = Linear(inner, self.width, bias=bias)
            self._activation = activation(config.get("projector_hidden_act", "gelu"))
        else:
            self.linear1 = Linear(joined, self.width, bias=False)

    def start(self, embedded: mx.array, grid: Grid) -> mx.array:
        """Embedded patches and their positions."""
        if self._resampled:
            table = resize_table(self.position, grid, "mean")
        else:
            table = self.position[fitted(grid, round(self.position.shape[0] ** 0.5))]
        return embedded + table

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """Nothing: positions are part of the first states."""
        return lambda number: {}

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """Normalised states, merged and projected."""
        cells = merge_cells(self.after(states), grid, self.merge)
        if "norm" in self:
            cells = self.norm(cells)
        features: mx.array = self.linear1(cells)
        return self.linear2(self._activation(features)) if "linear2" in self else features

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """None of its layers has features of its own."""
        raise NotImplementedError


def is_lfm2(config: dict[str, Any]) -> bool:
    """Whether a config is that of LFM2-VL."""
    return str(config["model_type"]).replace("-", "_") == "lfm2_vl"


def merge_of(config: dict[str, Any]) -> int:
    """Patches a side that become one token."""
    return int(config["downsample_factor"] if is_lfm2(config) else config.get("scale_factor", 2))


def fitted(grid: Grid, side: int) -> mx.array:
    """Entries of a square table of positions for a grid that is spread over it, in row-major order."""
    rows, columns = (mx.arange(count) * side // count for count in grid)
    return (rows[:, None] * side + columns[None]).reshape(-1)


def arrays(found: Weights, config: dict[str, Any]) -> Weights:
    """The arrays by our names, made to fit products."""
    return {**found, "patch.weight": patch_weights(found["patch.weight"])}
