"""InternViT, the tower of InternVL, with its class token and its projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.checkpoint.vision import side_of
from zmqengine.engine.models.arrays import Weights
from zmqengine.engine.vision.towers.block import BlockShape, TowerBlock
from zmqengine.engine.vision.towers.layered import Grid
from zmqengine.engine.vision.towers.parts import merge_cells, patch_weights
from zmqengine.errors import ModelLoadError

PREFIXES = ("vision_model.", "vision_tower.", "mlp1.", "multi_modal_projector.")
# OpenGVLab's names, and those of transformers.
_OLD, _NEW = r"vision_model\.encoder\.layers\.(\d+)\.", r"vision_tower\.encoder\.layer\.(\d+)\."
RULES = (
    (r"vision_model\.embeddings\.class_embedding", r"start_token"),
    (r"vision_model\.embeddings\.position_embedding", r"position"),
    (r"vision_model\.embeddings\.patch_embedding\.(\w+)", r"patch.\1"),
    (_OLD + r"(norm\d)\.(\w+)", r"layers.\1.\2.\3"),
    (_OLD + r"attn\.qkv\.(\w+)", r"layers.\1.qkv.\2"),
    (_OLD + r"attn\.proj\.(\w+)", r"layers.\1.out.\2"),
    (_OLD + r"attn\.q_norm\.(\w+)", r"layers.\1.query_norm.\2"),
    (_OLD + r"attn\.k_norm\.(\w+)", r"layers.\1.key_norm.\2"),
    (_OLD + r"mlp\.fc1\.(\w+)", r"layers.\1.up.\2"),
    (_OLD + r"mlp\.fc2\.(\w+)", r"layers.\1.down.\2"),
    (_OLD + r"ls(\d)", r"layers.\1.scale\2"),
    (r"mlp1\.0\.(\w+)", r"norm.\1"),
    (r"mlp1\.1\.(\w+)", r"linear1.\1"),
    (r"mlp1\.3\.(\w+)", r"linear2.\1"),
    (r"vision_tower\.embeddings\.cls_token", r"start_token"),
    (r"vision_tower\.embeddings\.position_embeddings", r"position"),
    (r"vision_tower\.embeddings\.patch_embeddings\.projection\.(\w+)", r"patch.\1"),
    (_NEW + r"layernorm_before\.(\w+)", r"layers.\1.norm1.\2"),
    (_NEW + r"layernorm_after\.(\w+)", r"layers.\1.norm2.\2"),
    (_NEW + r"attention\.([qkv])_proj\.(\w+)", r"layers.\1.\2.\3"),
    (_NEW + r"attention\.q_norm\.(\w+)", r"layers.\1.query_norm.\2"),
    (_NEW + r"attention\.k_norm\.(\w+)", r"layers.\1.key_norm.\2"),
    (_NEW + r"attention\.projection_layer\.(\w+)", r"layers.\1.out.\2"),
    (_NEW + r"mlp\.fc1\.(\w+)", r"layers.\1.up.\2"),
    (_NEW + r"mlp\.fc2\.(\w+)", r"layers.\1.down.\2"),
    (_NEW + r"lambda_(\d)", r"layers.\1.scale\2"),
    (r"multi_modal_projector\.layer_norm\.(\w+)", r"norm.\1"),
    (r"multi_modal_projector\.linear_(\d)\.(\w+)", r"linear\1.\2"),
)


class InternVit(Module):
    """The encoder of a config of `internvl_chat` or `internvl`."""

    deep_layers: Sequence[int] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        vision = config["vision_config"]
        width, patch, side = (
            int(vision["hidden_size"]),
            side_of(vision["patch_size"]),
            side_of(vision["image_size"]),
        )
        if not vision.get("use_mean_pooling", True):
            raise ModelLoadError(
                "config.json: an InternViT with a norm behind its last layer is not known here"
            )
        shape = BlockShape(
            width,
            int(vision["num_attention_heads"]),
            int(vision["intermediate_size"]),
            norm="rms" if vision.get("norm_type") == "rms_norm" else "layer",
            eps=float(vision.get("layer_norm_eps", 1e-6)),
            qkv_bias=bool(vision.get("qkv_bias", vision.get("attention_bias", True))),
            activation=vision.get("hidden_act", "gelu"),
            scaled=True,
            normed_heads=bool(vision.get("qk_normalization", vision.get("use_qk_norm", False))),
        )
        self.patch = Linear(3 * patch**2, width)
        self.start_token = mx.zeros((1, 1, width))
        self.position = mx.zeros((1, (side // patch) ** 2 + 1, width))
        self.layers = [TowerBlock(shape) for _ in range(vision["num_hidden_layers"])]
        text = config.get("text_config") or config["llm_config"]
        self.width = int(text["hidden_size"])
        self.token_floats = shape.token_floats(patch)
        self.merge, self.extra_tokens = merge_of(config), 1
        self.norm = LayerNorm(width * self.merge**2)
        self.linear1 = Linear(width * self.merge**2, self.width)
        self.linear2 = Linear(self.width, self.width)

    def start(self, embedded: mx.array, grid: Grid) -> mx.array:
        """The class token and embedded patches, with their positions: a tile fills the table."""
        first = mx.broadcast_to(self.start_token, (embedded.shape[0], 1, embedded.shape[-1]))
        return mx.concatenate([first, embedded], axis=1) + self.position

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """Nothing: positions are part of the first states."""
        return lambda number: {}

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """States of the patches, merged and projected."""
        cells = merge_cells(states, grid, self.merge)
        features: mx.array = self.linear2(gelu(self.linear1(self.norm(cells))))
        return features

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """None of its layers has features of its own."""
        raise NotImplementedError


def merge_of(config: dict[str, Any]) -> int:
    """Patches a side that become one token."""
    return round(1 / float(config.get("downsample_ratio", 0.5)))


def arrays(found: Weights, config: dict[str, Any]) -> Weights:
    """The arrays by our names, made to fit products."""
    return {**found, "patch.weight": patch_weights(found["patch.weight"])}
