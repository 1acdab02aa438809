"""Towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: positions by rotation, some with windows or a table beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from zmqengine.engine.models.arrays import Weights
from zmqengine.engine.vision.towers.block import BlockShape, TowerBlock, Windows, axes_rotation, norm_of
from zmqengine.engine.vision.towers.layered import Grid
from zmqengine.engine.vision.towers.parts import merge_cells, patch_weights, resize_table

PREFIXES = ("visual.", "vision_tower.")
_TOWER = r"(?:visual|vision_tower)\."
_LAYER = _TOWER + r"blocks\.(\d+)\."
RULES = (
    (_TOWER + r"patch_embed\.proj\.(\w+)", r"patch.\1"),
    (_TOWER + r"pos_embed\.weight", r"position"),
    (_LAYER + r"norm(\d)\.(\w+)", r"layers.\1.norm\2.\3"),
    (_LAYER + r"attn\.qkv\.(\w+)", r"layers.\1.qkv.\2"),
    (_LAYER + r"attn\.proj\.(\w+)", r"layers.\1.out.\2"),
    (_LAYER + r"mlp\.(gate|up|down)_proj\.(\w+)", r"layers.\1.\2.\3"),
    (_LAYER + r"mlp\.(?:linear_)?fc1\.(\w+)", r"layers.\1.up.\2"),
    (_LAYER + r"mlp\.(?:linear_)?fc2\.(\w+)", r"layers.\1.down.\2"),
    (_TOWER + r"merger\.(?:ln_q|norm)\.(\w+)", r"merger.norm.\1"),
    (_TOWER + r"merger\.(?:mlp\.0|linear_fc1)\.(\w+)", r"merger.linear1.\1"),
    (_TOWER + r"merger\.(?:mlp\.2|linear_fc2)\.(\w+)", r"merger.linear2.\1"),
    (_TOWER + r"deepstack_merger_list\.(\d+)\.norm\.(\w+)", r"deep_mergers.\1.norm.\2"),
    (_TOWER + r"deepstack_merger_list\.(\d+)\.linear_fc(\d)\.(\w+)", r"deep_mergers.\1.linear\2.\3"),
)


class Merger(Module):
    """Patches of a cell to a feature: a norm, in front of the merge or behind it, and two products."""

    def __init__(self, width: int, merge: int, out: int, norm: str, *, norms_cells: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        joined = width * merge**2
        self.norm = norm_of(norm, joined if norms_cells else width, 1e-6)
        self.linear1 = Linear(joined, joined)
        self.linear2 = Linear(joined, out)
        self._merge = merge
        self._norms_cells = norms_cells

    def __call__(self, states: mx.array, grid: Grid) -> mx.array:
        """Features [tiles, cells, out]."""
        if self._norms_cells:
            cells = self.norm(merge_cells(states, grid, self._merge))
        else:
            cells = merge_cells(self.norm(states), grid, self._merge)
        features: mx.array = self.linear2(gelu(self.linear1(cells)))
        return features


class QwenVision(Module):
    """The encoder of a config of `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`, `qwen3_5` or their mixtures of experts."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        vision = config["vision_config"]
        is_first, is_windowed = config["model_type"] == "qwen2_vl", config["model_type"] == "qwen2_5_vl"
        # Qwen2-VL calls the width of its features `hidden_size`.
        width, heads = int(vision["embed_dim" if is_first else "hidden_size"]), int(vision["num_heads"])
        inner = int(width * vision.get("mlp_ratio", 4)) if is_first else int(vision["intermediate_size"])
        norm = "rms" if is_windowed else "layer"
        usual = "quick_gelu" if is_first else "silu" if is_windowed else "gelu_pytorch_tanh"
        shape = BlockShape(
            width, heads, inner, norm=norm, gated=is_windowed, activation=vision.get("hidden_act", usual)
        )
        patch, merge = int(vision["patch_size"]), int(vision.get("spatial_merge_size", 2))
        has_table = not (is_first or is_windowed)
        self.patch = Linear(3 * patch**2, width, bias=has_table)
        if has_table:
            self.position = mx.zeros((int(vision["num_position_embeddings"]), width))
        self.layers = [TowerBlock(shape) for _ in range(vision["depth"])]
        self.width = int(vision["hidden_size" if is_first else "out_hidden_size"])
        self.merge, self.extra_tokens = merge, 0
        self.merger = Merger(width, merge, self.width, norm, norms_cells=False)
        self.deep_layers: Sequence[int] = tuple(vision.get("deepstack_visual_indexes") or ())
        if self.deep_layers:
            self.deep_mergers = [
                Merger(width, merge, self.width, norm, norms_cells=True) for _ in self.deep_layers
            ]
        self.token_floats = shape.token_floats(patch)
        dim = width // heads // 2
        self._freqs = 10_000.0 ** (-mx.arange(0, dim, 2, dtype=mx.float32) / dim)
        self._full_layers = frozenset(vision.get("fullatt_block_indexes") or ()) if is_windowed else None
        # Patches a side of a window: whole cells.
        self._window = int(vision.get("window_size", 112)) // merge // patch * merge if is_windowed else 0

    def start(self, embedded: mx.array, grid: Grid) -> mx.array:
        """Embedded patches; Qwen3's with positions, whose table is spread over the grid."""
        return embedded + resize_table(self.position, grid, "corners") if "position" in self else embedded

    def positions(self, grid: Grid) -> Callable[[int], dict[str, Any]]:
        """The rotation, alike in all layers, and the windows of layers with windows."""
        rotation = axes_rotation(grid, self._freqs, self._freqs)
        windows = windows_of(grid, self._window) if self._full_layers is not None else None

        def keywords(number: int) -> dict[str, Any]:
            is_full = self._full_layers is None or number in self._full_layers
            return {"rotation": rotation, "windows": None if is_full else windows}

        return keywords

    def finish(self, states: mx.array, grid: Grid) -> mx.array:
        """Merged states."""
        return self.merger(states, grid)

    def deep(self, states: mx.array, place: int, grid: Grid) -> mx.array:
        """Merged states of an earlier layer."""
        return self.deep_mergers[place](states, grid)


def windows_of(grid: Grid, side: int) -> Windows | None:
    """Squares of patches that attend to each other alone, from the top left; None for a grid of one."""
    rows, columns = grid
    if rows <= side and columns <= side:
        return None
    # A large image has a thousand windows: as many small arrays of MLX would be a long piece.
    places = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for row in range(0, rows, side):
        for column in range(0, columns, side):
            part = places[row : row + side, column : column + side]
            groups.setdefault(part.shape, []).append(part.reshape(-1))
    stacked = [np.stack(group) for group in groups.values()]
    order = np.argsort(np.concatenate([group.reshape(-1) for group in stacked])).astype(np.int32)
    return Windows([mx.array(group) for group in stacked], mx.array(order))


def arrays(found: Weights, config: dict[str, Any]) -> Weights:
    """The arrays by our names, made to fit products."""
    return {**found, "patch.weight": patch_weights(found["patch.weight"])}
