"""The block that all towers are made of: a norm and attention, a norm and an MLP, each added to the states.

States are [tiles, tokens, width]; tokens of different tiles never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from zmqengine.engine.models.arrays import activation
from zmqengine.engine.vision.towers.cutting import ATTENTION_FLOATS, Filled, cuts

SCORES_BYTES_MAX = 64 << 20
"""Attention scores of a piece: more tokens are cut by queries. On Metal a kernel holds none for most widths of heads,
but no documented call tells for which."""


class BlockShape(NamedTuple):
    """Sizes and options of the blocks of one tower.

    `norm` is "layer" or "rms". With `gated` the MLP has a gate, as Llama's. `scaled`: the addend is multiplied by
    learned scales. `normed_heads`: queries and keys get an RMS norm over all of their heads.
    """

    width: int
    heads: int
    inner: int
    norm: str = "layer"
    eps: float = 1e-6
    qkv_bias: bool = True
    bias: bool = True
    gated: bool = False
    activation: str = "gelu_pytorch_tanh"
    scaled: bool = False
    normed_heads: bool = False

    @property
    def floats(self) -> int:
        """Multiplications of a token in the products of a block, as multiples of its width."""
        return 4 * self.width + (3 if self.gated else 2) * self.inner

    def token_floats(self, patch: int) -> int:
        """Floats that a token takes at most at one time, its patch included and attention scores not."""
        return 8 * self.width + 3 * self.inner + 3 * patch**2

    def shares(self, seen: int) -> tuple[float, float, float]:
        """Shares of queries, keys and values, of attention where a token sees `seen`, and of the rest.

        They are parts of the products of a block: in a large image attention is many times those.
        """
        projected = 3 * self.width
        return (
            projected / self.floats,
            ATTENTION_FLOATS * seen / self.floats,
            (self.floats - projected) / self.floats,
        )


class Rotation(NamedTuple):
    """Cosines and sines of rotary positions, [tokens, half of a head's width] in float32."""

    cos: mx.array
    sin: mx.array

    def part(self, start: int, end: int) -> Rotation:
        """Rotation of the tokens `start` to `end`."""
        return Rotation(self.cos[start:end], self.sin[start:end])


class Windows(NamedTuple):
    """Tokens that attend to each other alone: `groups` of [windows, tokens] by number of tokens, and the way back."""

    groups: Sequence[mx.array]
    order: mx.array


class TowerBlock(Module):
    """One block, computed in pieces. `rotation` and `windows` depend on the grid of the tiles."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = shape.width, shape.inner
        self.norm1 = norm_of(shape.norm, width, shape.eps)
        self.norm2 = norm_of(shape.norm, width, shape.eps)
        self.qkv = Linear(width, 3 * width, bias=shape.qkv_bias)
        self.out = Linear(width, width, bias=shape.bias)
        self.up = Linear(width, inner, bias=shape.bias)
        self.down = Linear(inner, width, bias=shape.bias)
        if shape.gated:
            self.gate = Linear(width, inner, bias=shape.bias)
        if shape.normed_heads:
            self.query_norm = RMSNorm(width, eps=shape.eps)
            self.key_norm = RMSNorm(width, eps=shape.eps)
        if shape.scaled:
            self.scale1 = mx.ones((width,))
            self.scale2 = mx.ones((width,))
        self.shape = shape
        self._activation = activation(shape.activation)

    def __call__(self, states: mx.array) -> mx.array:
        """The states after the block, without RoPE and in one piece; training calls it."""
        pieces = self.pieces(states, lambda: states.size)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                after: mx.array = end.value
                return after

    def pieces(
        self,
        states: mx.array,
        patches_max: Callable[[], int],
        rotation: Rotation | None = None,
        windows: Windows | None = None,
    ) -> Generator[tuple[list[mx.array], int], None, mx.array]:
        """Arrays to evaluate one after the other, with their numbers of tokens; returns the states after the block.

        Queries, keys and values are needed of all tokens before any attends. Where that does not fit into the first
        piece it comes in pieces of its own; then each has attention and the MLP of some. `patches_max` is asked for
        each.
        """
        tiles, tokens, _ = states.shape
        seen = tokens if windows is None else max(group.shape[1] for group in windows.groups)
        before, within, behind = self.shape.shares(seen)
        is_whole = patches_max() >= tiles * tokens * (before + within + behind)
        if is_whole:
            queries, keys, values = self._project(states, rotation)
        else:
            filled = [Filled(tokens, axis=2) for _ in range(3)]
            for start, end, patches in cuts(tokens, patches_max, tiles=tiles, share=before):
                own_rotation = None if rotation is None else rotation.part(start, end)
                made = self._project(states[:, start:end], own_rotation)
                for whole, part in zip(filled, made, strict=True):
                    whole.put(start, part)
                yield [whole.array for whole in filled], patches
            queries, keys, values = (whole.array for whole in filled)
            del filled, whole, part, made
        if is_whole and windows is None:
            # Or each piece would copy them.
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        attended = None
        tokens_max = tokens
        share = behind
        if windows is None:
            tokens_max = max(1, SCORES_BYTES_MAX // (4 * tiles * self.shape.heads * tokens))
            share += within
        elif is_whole:
            attended = _attend_windows(queries, keys, values, windows)
            share += within
        else:
            attended = yield from _windows_in_pieces(queries, keys, values, windows, patches_max, within)
        if is_whole:
            share += before
        after = Filled(tokens)
        for start, end, patches in cuts(tokens, patches_max, tiles=tiles, share=share, tokens_max=tokens_max):
            if attended is None or windows is None:
                own = attend(queries[:, :, start:end], keys, values)
            else:
                own = attended[:, windows.order[start:end]]
            after.put(start, self._add(states[:, start:end], own))
            yield [after.array], patches
        return after.array

    def _project(self, states: mx.array, rotation: Rotation | None) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values, [tiles, heads, tokens, width of a head] each."""
        shape = self.shape
        queries, keys, values = mx.split(self.qkv(self.norm1(states)), 3, axis=-1)
        if shape.normed_heads:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        tiles, tokens, _ = states.shape
        queries, keys, values = (
            part.reshape(tiles, tokens, shape.heads, -1).transpose(0, 2, 1, 3)
            for part in (queries, keys, values)
        )
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        return queries, keys, values

    def _add(self, states: mx.array, attended: mx.array) -> mx.array:
        """States of some tokens after the block, of those before it and of what their heads attended to."""
        shape = self.shape
        attended = self.out(attended)
        states = states + (attended * self.scale1 if shape.scaled else attended)
        inputs = self.norm2(states)
        inner = self.up(inputs)
        inner = self._activation(self.gate(inputs)) * inner if shape.gated else self._activation(inner)
        added = self.down(inner)
        return states + (added * self.scale2 if shape.scaled else added)


def norm_of(kind: str, width: int, eps: float) -> Module:
    """A norm by its kind, "layer" or "rms"."""
    return RMSNorm(width, eps=eps) if kind == "rms" else LayerNorm(width, eps=eps)


def rotate(states: mx.array, rotation: Rotation) -> mx.array:
    """Heads [tiles, heads, tokens, width] turned by their positions, in float32: number i with i + width / 2."""
    cos, sin = rotation
    first, second = mx.split(states.astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(states.dtype)


def axes_rotation(grid: tuple[int, int], row_freqs: mx.array, column_freqs: mx.array) -> Rotation:
    """Rotation by row, then by column, of tokens in row-major order."""
    rows, columns = grid
    by_row = mx.arange(rows, dtype=mx.float32)[:, None, None] * row_freqs
    by_column = mx.arange(columns, dtype=mx.float32)[None, :, None] * column_freqs

    def spread(function: Callable[[mx.array], mx.array]) -> mx.array:
        # A row has one angle for all of its columns: a large image has few angles and millions of numbers.
        numbers = [
            mx.broadcast_to(function(angles), (rows, columns, angles.shape[-1]))
            for angles in (by_row, by_column)
        ]
        return mx.concatenate(numbers, axis=-1).reshape(rows * columns, -1)

    return Rotation(spread(mx.cos), spread(mx.sin))


def _attend_windows(queries: mx.array, keys: mx.array, values: mx.array, windows: Windows) -> mx.array:
    """Attention within windows, [tiles, tokens, width] in the order of the windows."""
    return mx.concatenate([_attended(group, queries, keys, values) for group in windows.groups], axis=1)


def _windows_in_pieces(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    windows: Windows,
    patches_max: Callable[[], int],
    share: float,
) -> Generator[tuple[list[mx.array], int], None, mx.array]:
    """`_attend_windows`, some windows at a time."""
    filled = Filled(queries.shape[2])
    before = 0
    for group in windows.groups:
        count, tokens = group.shape
        for start, end, patches in cuts(count, patches_max, tiles=queries.shape[0] * tokens, share=share):
            filled.put(before + start * tokens, _attended(group[start:end], queries, keys, values))
            yield [filled.array], patches
        before += count * tokens
    return filled.array


def _attended(group: mx.array, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attention within windows of one size, [tiles, tokens, width] in their order."""
    tiles, heads, _, width = queries.shape
    own = [
        part[:, :, group].transpose(0, 2, 1, 3, 4).reshape(-1, heads, group.shape[1], width)
        for part in (queries, keys, values)
    ]
    return attend(*own).reshape(tiles, -1, heads * width)


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attention of heads [tiles, heads, tokens, width of a head] to all keys of their tile: [tiles, tokens, width]."""
    tiles, _, tokens, width = queries.shape
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=width**-0.5)
    return attended.transpose(0, 2, 1, 3).reshape(tiles, tokens, -1)
