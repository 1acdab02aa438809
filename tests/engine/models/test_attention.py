"""Attention over slots is plain attention of each row over its own tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine.cpu.numpy_attention import NumpyAttention, NumpyStorage
from zmqengine.engine.kv.eight_bits import packed, widened
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import KVShape, MlxStorage, Slot, Slots, grouped
from zmqengine.engine.models.attention import WIDTH_MAX, MlxAttention, PlacedPiece, layout_of, padded
from zmqengine.engine.models.layers import HeadShape, RotaryEmbedding

# Sums of a few hundred float32 products, in another order.
TOLERANCE = 5e-5
ROTATION = RotaryEmbedding(8, False, 10000.0, 1.0, None, 1.0)
# Layers that see all, and windows shorter than a verify block, than a prompt, and than a slot.
WINDOWS = [None, 5, 70, 300]
HEADS = [
    HeadShape(heads, 2, 8, 0.3, ROTATION, None, window, mx.float32)
    for window, heads in zip(WINDOWS, (4, 2, 6, 4), strict=True)
]
# Three groups of 32 in a head.
PACKED = [heads._replace(dim=96, scale=0.1) for heads in HEADS]
KINDS: dict[str, tuple[Any, Any, list[HeadShape]]] = {
    "mlx, fused": (lambda: MlxAttention(HEADS, range(len(HEADS)), is_fused=True), MlxStorage, HEADS),
    "mlx, not fused": (lambda: MlxAttention(HEADS, range(len(HEADS)), is_fused=False), MlxStorage, HEADS),
    "numpy": (lambda: NumpyAttention(HEADS, range(len(HEADS))), NumpyStorage, HEADS),
    "mlx, in 8 bits": (lambda: MlxAttention(PACKED, range(len(PACKED))), MlxStorage, PACKED),
    "numpy, in 8 bits": (lambda: NumpyAttention(PACKED, range(len(PACKED))), NumpyStorage, PACKED),
}


class Rows:
    """Rows whose tokens have random keys and values, and what attention gives for their pieces."""

    def __init__(self, kind: str) -> None:
        attention, storage, self.heads = KINDS[kind]
        self.attention: Any = attention()
        self.is_numpy = storage is NumpyStorage
        self.group_size = 32 if self.heads is PACKED else None
        shapes = [KVShape(each.key_heads, each.dim, each.dtype, self.group_size) for each in self.heads]
        self.slots = Slots(shapes, 4096, storage())
        self.rows: dict[int, Slot] = {}
        self.known: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._random = np.random.default_rng(3)

    def open(self, row: int, tokens: int) -> None:
        self.rows[row] = self.slots.take(tokens)
        empty = np.zeros((0, 2, self.heads[0].dim), np.float32)
        self.known[row] = [(empty, empty) for _ in HEADS]

    def close(self, row: int, *, spoilt: bool = False) -> None:
        """Free a slot; with numbers that no other row may see, if `spoilt`."""
        slot = self.rows.pop(row)
        if spoilt:
            for shape, names in grouped(self.slots.shapes).items():
                if shape.dtype == mx.float32:
                    nan = mx.full((len(names), 1, shape.heads, slot.capacity, shape.dim), mx.nan)
                    self.slots.restore(slot, names, nan)
        slot.close(is_finite=not spoilt)

    def step(self, pieces: dict[int, tuple[int, int]], padding: int = 0) -> None:
        """Attend with `count` tokens of each row from `start` on, and compare."""
        order = sorted(
            pieces,
            key=lambda row: (self.rows[row].capacity, pieces[row][1] > WIDTH_MAX, self.rows[row].index),
        )
        total = sum(count for _, count in pieces.values())
        placed = [PlacedPiece(self.rows[row], *pieces[row]) for row in order]
        layout = self.attention.begin(placed, total + padding)
        for layer, heads in enumerate(self.heads):
            shapes = [heads.heads, heads.key_heads, heads.key_heads]
            qkv = [
                self._random.normal(size=(total + padding, count, heads.dim)).astype(np.float32)
                for count in shapes
            ]
            given = qkv if self.is_numpy else list(map(mx.array, qkv))
            attended = np.array(self.attention.attend(layout, layer, given))
            assert attended.shape == (total + padding, heads.heads * heads.dim)
            at = 0
            for row in order:
                start, count = pieces[row]
                queries, keys, values = (array[at : at + count] for array in qkv)
                old_keys, old_values = self.known[row][layer]
                keys = np.concatenate([old_keys[:start], self.kept(keys)])
                values = np.concatenate([old_values[:start], self.kept(values)])
                self.known[row][layer] = keys, values
                wanted = plain(queries, keys, values, start, heads)
                np.testing.assert_allclose(
                    attended[at : at + count],
                    wanted,
                    atol=TOLERANCE,
                    rtol=0,
                    err_msg=f"row {row}, layer {layer}",
                )
                at += count

    def kept(self, numbers: np.ndarray) -> np.ndarray:
        """Keys or values as slots keep them."""
        if self.group_size is None:
            return numbers
        return np.array(widened(packed(mx.array(numbers), self.group_size)))


def plain(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, heads: HeadShape
) -> np.ndarray:
    """Attention of tokens from `start` on over all tokens of their row."""
    group = heads.heads // heads.key_heads
    last, column = start + np.arange(len(queries))[:, None], np.arange(len(keys))
    seen = (column <= last) & (column > last - (heads.window or len(keys)))
    outputs = np.zeros((len(queries), heads.heads, heads.dim))
    for head in range(heads.heads):
        own_keys, own_values = (array[:, head // group].astype(np.float64) for array in (keys, values))
        scores = np.where(seen, queries[:, head] @ own_keys.T * heads.scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ own_values
    return outputs.reshape(len(queries), -1)


# Five seconds of random steps; the edges of windows and columns have it in the default tier.
LONG = [pytest.param(kind, marks=pytest.mark.slow) if kind == "mlx, in 8 bits" else kind for kind in KINDS]


@pytest.mark.parametrize("kind", LONG)
def test_rows_of_unlike_lengths_attend_to_their_own_tokens(kind: str) -> None:
    """Prompts, decode, verify blocks, and all of them in one step, in slots of three capacities."""
    rows = Rows(kind)
    lengths = {0: 40, 1: 1, 2: 600, 3: 9, 4: 1100, 5: 8, 6: 530}
    for row, length in lengths.items():
        rows.open(row, length + 30)
    # Prompts in one step, one of them behind the others in slices, next to decode.
    rows.step({row: (0, length) for row, length in lengths.items() if row not in (2, 4)})
    rows.step({2: (0, 590), 4: (0, 17), 0: (40, 1)})
    rows.step({2: (590, 10), 4: (17, 1083), 0: (41, 1), 3: (9, 1)})
    lengths |= {0: 42, 3: 10}
    # Decode of all rows, then blocks of unlike widths, and again over tokens that were rolled back.
    rows.step({row: (length, 1) for row, length in lengths.items()})
    rows.step({row: (length + 1, 1 + row % WIDTH_MAX) for row, length in lengths.items()})
    rows.step({row: (length + 2, WIDTH_MAX) for row, length in lengths.items()})
    rows.step({row: (length + 3, 1) for row, length in lengths.items()})
    rows.step({1: (5, 25), 0: (46, 3), 5: (12, 1)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 1, 7])
def test_padding_and_free_slots_change_nothing(kind: str, padding: int) -> None:
    """Whatever free slots between the rows hold, and in whatever order the rows are in the step."""
    rows = Rows(kind)
    for row in range(6):
        rows.open(row, 60)
    rows.step({row: (0, 3 + 5 * row) for row in range(6)}, padding)
    rows.close(0, spoilt=True)
    rows.close(3, spoilt=True)
    rows.step({5: (28, 1), 1: (8, 1)}, padding)
    rows.step({2: (13, 1)}, padding)
    rows.step({4: (23, 2), 1: (9, 4), 5: (29, 1)}, padding)
    # The new row is in a slot that was cleared.
    rows.open(7, 60)
    rows.step({7: (0, 2), 5: (30, 1)}, padding)
    rows.step({7: (2, 20), 2: (14, 1)}, padding)
    rows.step({7: (22, 1), 2: (15, 1)}, padding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_the_edges_of_windows_and_columns(kind: str) -> None:
    """One token more or less than a window, and than what is read at once of a slot."""
    rows = Rows(kind)
    edges = [1, 4, 5, 6, 70, 71, 127, 128, 129, 256, 299, 300, 301, 384, 511]
    for row, edge in enumerate(edges):
        rows.open(row, 512)
        rows.step({row: (0, edge)})
    rows.step({row: (edge, 1) for row, edge in enumerate(edges)})
    for row, edge in enumerate(edges):
        if edge > 8:
            rows.step({row: (edge - 8, 8)})


def test_layouts_have_few_shapes() -> None:
    """However many rows, and however long: a device has a kernel or a buffer for each shape."""
    slots = Slots([KVShape(1, 2, mx.float32)], 4096, NumpyStorage())
    taken = [slots.take(400) for _ in range(64)]
    shapes, prompts = set(), set()
    for rows in range(1, 65):
        for start in range(0, 500, 9):
            (layout,) = layout_of([PlacedPiece(slot, start, 1) for slot in taken[:rows]])
            assert layout.short is not None
            count, width = layout.short.tokens.shape
            assert rows <= count <= max(rows + 1, rows * 5 / 4)
            assert start < layout.short.columns <= start + 128
            shapes.add((count, width, layout.short.columns))
    for count in range(WIDTH_MAX + 1, 513):
        (layout,) = layout_of([PlacedPiece(taken[0], 0, count)])
        (piece,) = layout.prompts
        assert count <= padded(count) < 2 * count + 16
        prompts.add((padded(count), piece.columns))
    assert len({few_sizes(rows) for rows in range(1, 65)}) * 4 >= len(shapes)
    assert len(prompts) <= 24
