"""The products that adapters add to those of a decoder's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.adapters.lora_files import Lora, Pair
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.layers import Gated, HeadShape, Linear
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.errors import ModelLoadError


class _Stacked(NamedTuple):
    """The pairs of all adapters for one product: [adapters + 1, inputs, rank] and [adapters + 1, rank, outputs]; the
    first are zeros."""

    down: Any
    up: Any


class Adapters:
    """Adapters on the weights of a decoder, by name. Raises `ModelLoadError` for products that none may change."""

    def __init__(self, weights: DecoderWeights, loras: Sequence[Lora]) -> None:
        self._numbers = {lora.name: number for number, lora in enumerate(loras, start=1)}
        left = {(lora.name, *key) for lora in loras for key in lora.pairs}
        self._stacked: dict[int, _Stacked] = {}
        self.bytes = 0
        for layer, modules, linear in _products(weights):
            given = [[lora.pairs.get((layer, module)) for module, _ in modules] for lora in loras]
            left -= {(lora.name, layer, module) for lora in loras for module, _ in modules}
            if any(pair is not None for pairs in given for pair in pairs):
                stacked = _stack(given, [width for _, width in modules], linear)
                self.bytes += stacked.down.nbytes + stacked.up.nbytes
                self._stacked[id(linear.weight)] = stacked
        if left:
            name, layer, module = min(left)
            raise ModelLoadError(
                f"the adapter {name} changes {module} of layer {layer}, which no adapter may change with this model"
            )

    def of_step(self, pieces: Sequence[RowPiece], padded: int) -> Deltas | None:
        """The products to add to those of a step; None where no row has an adapter."""
        numbers = [self._numbers[piece.row.adapter] if piece.row.adapter else 0 for piece in pieces]
        if not any(numbers):
            return None
        tokens = np.repeat(np.array(numbers, np.int32), [piece.count for piece in pieces])
        return Deltas(self._stacked, np.pad(tokens, (0, padded - len(tokens)), mode="edge"))


class Deltas:
    """Products to add for tokens with adapters of these numbers, [tokens]; 0 is none."""

    def __init__(self, stacked: Mapping[int, _Stacked], numbers: np.ndarray) -> None:
        self._stacked = stacked
        self._numbers = numbers
        self._index = mx.array(numbers)
        self._is_one = bool((numbers == numbers[0]).all())

    def chosen(self, tokens: Any) -> Deltas:
        """The products for some of the tokens, by their indices."""
        return Deltas(self._stacked, self._numbers[np.asarray(tokens)])

    def add(self, outputs: Any, inputs: Any, linear: Linear) -> Any:
        """The outputs of a product with what adapters add."""
        stacked = self._stacked.get(id(linear.weight))
        if stacked is None:
            return outputs
        down, up = stacked
        if isinstance(inputs, np.ndarray):
            for number in np.unique(self._numbers[self._numbers > 0]):
                own = self._numbers == number
                outputs[own] += (inputs[own] @ down[number]) @ up[number]
            return outputs
        if self._is_one:
            number = int(self._numbers[0])
            return outputs + (inputs @ down[number]) @ up[number]
        narrow = mx.gather_mm(inputs[:, None], down, rhs_indices=self._index)
        return outputs + mx.gather_mm(narrow, up, rhs_indices=self._index)[:, 0]


def _products(weights: DecoderWeights) -> Iterator[tuple[int, list[tuple[str, int]], Linear]]:
    """Products that adapters may change: the layer, the modules that are joined in one with their outputs, the
    weights."""
    for number, layer in enumerate(weights.layers):
        if not isinstance(layer, LlamaLayer):
            continue
        if isinstance(heads := layer.mixer, HeadShape):
            queries, keys = heads.heads * heads.dim * (1 + heads.gated), heads.key_heads * heads.dim
            widths = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
            yield from _joined(number, widths, layer.inputs)
            yield number, [("self_attn.o_proj", layer.out.outputs)], layer.out
        if isinstance(layer.mlp, Gated):
            half = sum(linear.outputs for linear in layer.mlp.gate_up) // 2
            yield from _joined(number, [("mlp.gate_proj", half), ("mlp.up_proj", half)], layer.mlp.gate_up)
            yield number, [("mlp.down_proj", layer.mlp.down.outputs)], layer.mlp.down


def _joined(
    number: int, modules: list[tuple[str, int]], linears: tuple[Linear, ...]
) -> Iterator[tuple[int, list[tuple[str, int]], Linear]]:
    if len(linears) == 1:
        yield number, modules, linears[0]
    else:
        for module, linear in zip(modules, linears, strict=True):
            yield number, [module], linear


def _stack(given: Sequence[Sequence[Pair | None]], widths: Sequence[int], linear: Linear) -> _Stacked:
    """The pairs of a joined product: the narrow ones side by side, and the outputs of each module apart."""
    ranks = [sum(0 if pair is None else pair.down.shape[1] for pair in pairs) for pairs in given]
    down = np.zeros((len(given) + 1, linear.inputs, max(ranks)), np.float32)
    up = np.zeros((len(given) + 1, max(ranks), sum(widths)), np.float32)
    for number, pairs in enumerate(given, start=1):
        rank, output = 0, 0
        for pair, width in zip(pairs, widths, strict=True):
            if pair is not None:
                if pair.down.shape[0] != linear.inputs or pair.up.shape != (pair.down.shape[1], width):
                    raise ModelLoadError(
                        f"an adapter is for another model: it has {tuple(pair.down.shape)} and "
                        f"{tuple(pair.up.shape)} for {linear.inputs} inputs and {width} outputs"
                    )
                within = slice(rank, rank + pair.down.shape[1])
                down[number, :, within] = np.array(pair.down.astype(mx.float32))
                up[number, within, output : output + width] = np.array(pair.up.astype(mx.float32))
                rank = within.stop
            output += width
    if isinstance(linear.weight, np.ndarray):
        return _Stacked(down, up)
    stacked = _Stacked(mx.array(down).astype(linear.dtype), mx.array(up).astype(linear.dtype))
    mx.eval(*stacked)
    return stacked
