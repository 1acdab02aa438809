"""The tower of Muse Spark: mlx-lm has it, so its modules run here, a few layers a piece."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.vision.tower import Features

PIECE_PATCHES = 1024
"""Patches times layers of a piece: one layer of a large image, many of a small one."""
# Floats a patch that a layer holds at once, in widths of the tower: its input, the same normed in float32, queries,
# keys and values before and after rotation, and what was attended.
_HELD_WIDTHS = 16


class MuseSparkTower:
    """A `Tower` of the modules in mlx-lm's `model`, with `mean` and `std` of red, green and blue from 0 to 1."""

    deep_layers = 0
    parameter_bytes = 0
    """They are the model's own."""

    def __init__(self, model: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        self._model = model
        self._args = model.args.vision
        # The functions of one call, which the pieces call one by one.
        self._functions = sys.modules[type(model).__module__]
        self._mean = mx.array(list(mean), mx.float32).reshape(3, 1)
        self._std = mx.array(list(std), mx.float32).reshape(3, 1)

    def embed(self, tokens: mx.array) -> mx.array:
        """The text model's embeddings, which it norms."""
        embedded: mx.array = self._model.model.language_model.embed(tokens)
        return embedded

    def begin(self, pixels: np.ndarray, grids: Sequence[tuple[int, int]]) -> MuseSparkJob:
        """Start an image, which has one grid."""
        return MuseSparkJob(self._pieces(pixels, *grids[0]))

    def peak_bytes(self, grids: Sequence[tuple[int, int]]) -> int:
        """The most bytes that a job holds at once; scores of attention are counted as if they were all kept."""
        args = self._args
        patches = max(rows * columns for rows, columns in grids)
        numbers = 3 * args.patch_size**2 * (2 + args.patch_temporal)
        floats = numbers + _HELD_WIDTHS * args.hidden_size + 3 * args.intermediate_size
        return int(4 * patches * floats + 2 * 4 * args.num_attention_heads * patches**2)

    def _pieces(self, pixels: np.ndarray, rows: int, columns: int) -> Iterator[mx.array]:
        args, parts, functions = self._args, self._model.model, self._functions
        tower = parts.vision_tower
        patches, dtype = rows * columns, tower.patch_embedder.patch_embedding.weight.dtype
        colours = mx.array(pixels).reshape(patches, -1, 3).transpose(0, 2, 1).astype(mx.float32)
        frame = ((colours / 255 - self._mean) / self._std).astype(dtype).reshape(patches, -1)
        states = tower.patch_embedder.patch_embedding(mx.tile(frame, (1, args.patch_temporal)))
        states = states + functions._position_embedding(
            tower.patch_embedder.position_embedding_table.weight,
            size=args.grid_size,
            grid_h=rows,
            grid_w=columns,
            ij=args.use_ij_pos_encoding,
        )
        states = tower.ln_pre(states)
        cos, sin = tower.rope(grid_h=rows, grid_w=columns)
        tiles = functions._attention_tiles(grid_h=rows, grid_w=columns, tile=args.grid_size)
        together = max(1, PIECE_PATCHES // patches)
        for number, (block, kind) in enumerate(zip(tower.layers, args.layer_types, strict=False)):
            states = block(states, cos=cos, sin=sin, tiles=None if kind == "full_attention" else tiles)
            if (number + 1) % together == 0:
                yield states
        merged = functions._pixel_shuffle_downsample(
            tower.ln_post(states), grid_h=rows, grid_w=columns, factor=args.merge_size
        )
        yield self._model.perception_emb_norm(parts.vision_projection(parts.vision_adapter(merged)))


class MuseSparkJob:
    """One image of Muse Spark."""

    def __init__(self, pieces: Iterator[mx.array]) -> None:
        self._pieces = pieces
        self._made: mx.array | None = None
        self._next: mx.array | None = next(pieces)

    def step(self) -> bool:
        """Compute the next piece; whether more remain."""
        self._made = self._next
        mx.eval(self._made)
        self._next = next(self._pieces, None)
        return self._next is not None

    def features(self) -> Features:
        """The last piece."""
        assert self._made is not None, "`step` was called to the end"
        return Features(self._made)
