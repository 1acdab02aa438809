"""The tower of Muse Spark: mlx-lm has it, so its modules run here, a layer or a part of one a piece."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.vision.tower import WHOLE, Features
from zmqengine.engine.vision.towers.cutting import ATTENTION_FLOATS, MERGE_SHARE, cuts

# Floats a patch that a layer holds at once, in widths of the tower: its input, the same normed in float32, queries,
# keys and values before and after rotation, and the output of attention.
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
        return MuseSparkJob(lambda patches_max: self._pieces(pixels, *grids[0], patches_max))

    def peak_bytes(self, grids: Sequence[tuple[int, int]]) -> int:
        """The most bytes that a job holds at once; scores of attention are counted as if they were all kept."""
        args = self._args
        patches = max(rows * columns for rows, columns in grids)
        numbers = 3 * args.patch_size**2 * (2 + args.patch_temporal)
        floats = numbers + _HELD_WIDTHS * args.hidden_size + 3 * args.intermediate_size
        return int(4 * patches * floats + 2 * 4 * args.num_attention_heads * patches**2)

    def _pieces(
        self, pixels: np.ndarray, rows: int, columns: int, patches_max: Callable[[], int]
    ) -> Iterator[tuple[list[mx.array], int]]:
        args, parts, functions = self._args, self._model.model, self._functions
        tower = parts.vision_tower
        patches, dtype = rows * columns, tower.patch_embedder.patch_embedding.weight.dtype
        numbers = args.patch_temporal * pixels.shape[1]
        embedded = []
        for start, end, counted in cuts(patches, patches_max, share=numbers / self._floats):
            colors = mx.array(pixels[start:end]).reshape(end - start, -1, 3).transpose(0, 2, 1)
            frame = ((colors.astype(mx.float32) / 255 - self._mean) / self._std).astype(dtype)
            frames = mx.tile(frame.reshape(end - start, -1), (1, args.patch_temporal))
            embedded.append(tower.patch_embedder.patch_embedding(frames))
            yield embedded[-1:], counted
        states = mx.concatenate(embedded) + functions._position_embedding(
            tower.patch_embedder.position_embedding_table.weight,
            size=args.grid_size,
            grid_h=rows,
            grid_w=columns,
            ij=args.use_ij_pos_encoding,
        )
        states = tower.ln_pre(states)
        cos, sin = tower.rope(grid_h=rows, grid_w=columns)
        tiles = functions._attention_tiles(grid_h=rows, grid_w=columns, tile=args.grid_size)
        for block, kind in zip(tower.layers, args.layer_types, strict=False):
            own_tiles = None if kind == "full_attention" else tiles
            whole = round(patches * (1 + self._attention_share(patches, own_tiles)))
            if patches_max() < whole:
                states = yield from self._parts(block, states, cos, sin, own_tiles, patches_max)
            else:
                states = block(states, cos=cos, sin=sin, tiles=own_tiles)
                yield [states], whole
        made = []
        band = columns * args.merge_size
        for start, end, counted in cuts(patches, patches_max, share=MERGE_SHARE, multiple=band):
            merged = functions._pixel_shuffle_downsample(
                tower.ln_post(states[start:end]),
                grid_h=(end - start) // columns,
                grid_w=columns,
                factor=args.merge_size,
            )
            projected = parts.vision_projection(parts.vision_adapter(merged))
            made.append(self._model.perception_emb_norm(projected))
            yield made[-1:], counted
        yield [mx.concatenate(made)], 0

    @property
    def _floats(self) -> int:
        """Multiplications of a patch in the products of a layer, as multiples of the tower's width."""
        return int(4 * self._args.hidden_size + 2 * self._args.intermediate_size)

    def _attention_share(self, patches: int, tiles: Any) -> float:
        """Attention of a patch as a part of its products, within tiles or to all."""
        seen = patches if tiles is None else max(group.shape[1] for group in tiles[0])
        return ATTENTION_FLOATS * seen / self._floats

    def _parts(
        self,
        block: Any,
        states: mx.array,
        cos: mx.array,
        sin: mx.array,
        tiles: Any,
        patches_max: Callable[[], int],
    ) -> Generator[tuple[list[mx.array], int], None, mx.array]:
        """A layer in pieces: queries, keys and values of all patches before any attends."""
        attention = block.attn
        patches = states.shape[0]
        attended = None
        groups, order = tiles or ([], None)
        before, within = 3 * self._args.hidden_size / self._floats, self._attention_share(patches, tiles)
        share = 1 - before
        rope = self._functions._apply_vision_rope
        projected = []
        for start, end, counted in cuts(patches, patches_max, share=before):
            heads = (1, end - start, attention.n_heads, attention.head_dim)
            own = attention.qkv_proj(block.norm1(states[start:end]))
            queries, keys, values = (part.reshape(heads) for part in mx.split(own, 3, axis=-1))
            places = {"cos": cos[:, start:end], "sin": sin[:, start:end]}
            projected.append((rope(queries, **places), rope(keys, **places), values))
            yield list(projected[-1]), counted
        queries, keys, values = (mx.concatenate(list(part), axis=1) for part in zip(*projected, strict=True))
        del projected
        if not groups:
            share += within
        else:
            found = []
            for group in groups:
                own_queries, own_keys, own_values = queries[0][group], keys[0][group], values[0][group]
                made = []
                count, tokens = group.shape
                for start, end, counted in cuts(tokens, patches_max, tiles=count, share=within):
                    made.append(attention._attention(own_queries[:, start:end], own_keys, own_values))
                    yield made[-1:], counted
                found.append(mx.concatenate(made, axis=1).reshape(-1, *queries.shape[2:]))
            attended = mx.concatenate(found)[order]
        parts: list[mx.array] = []
        for start, end, counted in cuts(patches, patches_max, share=share):
            own = (
                attention._attention(queries[:, start:end], keys, values)
                if attended is None
                else attended[start:end]
            )
            after = states[start:end] + attention.proj(own.reshape(end - start, -1))
            parts.append(after + block.mlp(block.norm2(after)))
            yield [parts[-1]], counted
        return mx.concatenate(parts)


class MuseSparkJob:
    def __init__(self, begin: Callable[[Callable[[], int]], Iterator[tuple[list[mx.array], int]]]) -> None:
        self._patches_max = WHOLE
        self._pieces = begin(lambda: self._patches_max)
        self._made: mx.array | None = None

    def step(self, patches_max: int = WHOLE) -> int:
        """Compute the next piece; its patches, or 0 if it was the last."""
        self._patches_max = patches_max
        arrays, patches = next(self._pieces)
        mx.eval(arrays)
        self._made = arrays[-1]
        return patches

    def features(self) -> Features:
        """The last piece."""
        assert self._made is not None, "`step` was called to the end"
        return Features(self._made)
