"""Parts that several families share: tables of positions, patches that become one token, arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from zmqengine.engine.models.arrays import Weights, joined, read_arrays, renamed
from zmqengine.errors import ModelLoadError

CHANNELS = 3


def merge_cells(
    states: mx.array, grid: tuple[int, int], merge: int, *, channels_first: bool = False
) -> mx.array:
    """[tiles, cells, merge * merge * width] of patches [tiles, patches, width] in row-major order.

    Of a cell's patches the first row comes first; with `channels_first` their numbers alternate.
    """
    rows, columns = grid
    tiles, _, width = states.shape
    cells = states.reshape(tiles, rows // merge, merge, columns // merge, merge, width)
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return cells.transpose(*order).reshape(tiles, rows * columns // merge**2, -1)


Sampling = Literal["mean", "corners"]
"""How a table of positions is read at another grid: torch's `interpolate` with `antialias`, or with `align_corners`."""


def resize_table(table: mx.array, grid: tuple[int, int], sampling: Sampling) -> mx.array:
    """A square table of positions [rows * columns, width] sampled bilinearly at another grid."""
    side = round(table.shape[0] ** 0.5)
    if grid == (side, side):
        return table
    by_row, by_column = (_samples(side, count, sampling) for count in grid)
    square = table.astype(mx.float32).reshape(side, side, -1)
    resized = mx.einsum("rs,scw->rcw", by_row, square)
    resized = mx.einsum("cs,rsw->rcw", by_column, resized)
    return resized.reshape(grid[0] * grid[1], -1).astype(table.dtype)


def _samples(side: int, count: int, sampling: Sampling) -> mx.array:
    """Weights [count, side] of a line of `side` numbers sampled at `count` places."""
    places = mx.arange(count, dtype=mx.float32)
    if sampling == "corners":
        centres, support = places * ((side - 1) / max(1, count - 1)), 1.0
    else:
        # A smaller grid takes the mean of more numbers.
        scale = side / count
        centres, support = (places + 0.5) * scale - 0.5, max(1.0, scale)
    distance = mx.abs(mx.arange(side, dtype=mx.float32)[None] - centres[:, None]) / support
    weights = mx.maximum(1 - distance, 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def patch_weights(weight: mx.array) -> mx.array:
    """A convolution's weights as those of a product with pixels in row-major order, RGB last.

    Torch keeps [outputs, 3, (frames,) rows, columns], MLX [outputs, (frames,) rows, columns, 3]. Frames see the same
    picture, so their weights are added up.
    """
    if weight.ndim == 2:
        return weight
    if weight.shape[1] == CHANNELS:
        weight = mx.moveaxis(weight, 1, -1)
    if weight.ndim == 5:
        weight = weight.astype(mx.float32).sum(axis=1).astype(weight.dtype)
    return weight.reshape(weight.shape[0], -1)


def tower_arrays(directory: Path, prefixes: Sequence[str], rules: Iterable[tuple[str, str]]) -> Weights:
    """Arrays of a checkpoint that a tower reads, under our names; queries, keys and values are joined.

    A name has to begin with one of `prefixes`, perhaps behind "model."; `rules` are as in `renamed`.
    """
    plain = {name.removeprefix("model."): array for name, array in read_arrays(directory).items()}
    arrays = {name: array for name, array in plain.items() if name.startswith(tuple(prefixes))}
    return joined(renamed(arrays, (), rules), ("q", "k", "v"), "qkv")


def fill(
    module: Module,
    arrays: Mapping[str, mx.array],
    directory: Path,
    config: Mapping[str, Any],
    *,
    on_gpu: bool,
) -> mx.Dtype:
    """Give a tower its arrays; returns the type that it computes in: the checkpoint's on a GPU, else float32.

    Products that the checkpoint has quantised stay so. Raises `ModelLoadError` for arrays that are missing or of
    another shape.
    """
    quantised = config.get("quantization") or {}
    if any(name.endswith(".scales") for name in arrays):
        quantize(
            module,
            group_size=int(quantised.get("group_size", 64)),
            bits=int(quantised.get("bits", 4)),
            class_predicate=lambda path, _: f"{path}.scales" in arrays,
        )
    try:
        module.load_weights(list(arrays.items()), strict=True)
    except ValueError as error:
        raise ModelLoadError(
            f"the arrays of the vision tower in {directory} are not those of its config.json: {error}"
        ) from error
    if not on_gpu:
        module.set_dtype(mx.float32)
    module.eval()
    filled = _arrays_of(module)
    mx.eval(filled)
    floats = [array.dtype for array in filled if mx.issubdtype(array.dtype, mx.floating)]
    return max(set(floats), key=floats.count)


def bytes_of(module: Module) -> int:
    """Bytes of the arrays of a tower."""
    return sum(array.nbytes for array in _arrays_of(module))


def _arrays_of(module: Module) -> list[mx.array]:
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[no-untyped-call]
    return list(parameters.values())
