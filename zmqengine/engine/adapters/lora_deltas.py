"""The products that adapters add to those of a decoder's layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.adapters.lora_files import Lora, Pair
from zmqengine.engine.models.architecture import DecoderLayer, DecoderWeights
from zmqengine.engine.models.families.gemma import GemmaLayer
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.families.qwen_next import QwenNextLayer
from zmqengine.engine.models.layers import Gated, HeadShape, Linear
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.ops import by_look_up
from zmqengine.errors import ModelLoadError


class Adapters:
    """Adapters of a decoder, by name. `weights` are its own with the factors of all of them.

    Raises `ModelLoadError` for products that none may change.
    """

    def __init__(self, weights: DecoderWeights, loras: Sequence[Lora]) -> None:
        self._numbers = {lora.name: number for number, lora in enumerate(loras, start=1)}
        adapting = _Adapting(loras)
        layers = tuple(adapting.layer(number, layer) for number, layer in enumerate(weights.layers))
        if adapting.left:
            name, number, module = min(adapting.left)
            raise ModelLoadError(
                f"the adapter {name} changes {module} of layer {number}, which no adapter may change with this model"
            )
        self.weights = weights._replace(layers=layers)
        self.bytes = adapting.bytes

    def of_step(self, pieces: Sequence[RowPiece], padded: int) -> Deltas | None:
        """The products to add to those of a step; None where no row has an adapter."""
        numbers = [self._numbers[piece.row.adapter] if piece.row.adapter else 0 for piece in pieces]
        if not any(numbers):
            return None
        tokens = np.repeat(np.array(numbers, np.int32), [piece.count for piece in pieces])
        return Deltas(np.pad(tokens, (0, padded - len(tokens)), mode="edge"))


class Deltas:
    """Products to add for tokens with adapters of these numbers, [tokens]; 0 is none."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._is_one = bool((numbers == numbers[0]).all())

    @functools.cached_property
    def looked_up(self) -> mx.array:
        """See `AddedProducts`."""
        return mx.array(self._numbers)

    def chosen(self, tokens: Any) -> Deltas:
        """The products for some of the tokens, by their indices."""
        return Deltas(self._numbers[np.asarray(tokens)])

    def add(self, outputs: Any, inputs: Any, linear: Linear) -> Any:
        """The outputs of a product with what adapters add."""
        down, up = linear.down, linear.up
        if down is None or up is None:
            return outputs
        if isinstance(inputs, np.ndarray):
            for number in np.unique(self._numbers[self._numbers > 0]):
                own = self._numbers == number
                outputs[own] += (inputs[own] @ down[number]) @ up[number]
            return outputs
        if self._is_one:
            number = int(self._numbers[0])
            return outputs + (inputs @ down[number]) @ up[number]
        return outputs + by_look_up(inputs, linear, self.looked_up)


class _Adapting:
    """Puts the factors of adapters into layers. `left`: what they change beyond the layers that were seen."""

    def __init__(self, loras: Sequence[Lora]) -> None:
        self._loras = loras
        self.left = {(lora.name, *key) for lora in loras for key in lora.pairs}
        self.bytes = 0

    def layer(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer with factors."""
        if not isinstance(layer, LlamaLayer | GemmaLayer | QwenNextLayer):
            return layer
        if isinstance(heads := layer.mixer, HeadShape):
            queries, keys = heads.heads * heads.dim * (1 + heads.gated), heads.key_heads * heads.dim
            widths = {"self_attn.q_proj": queries}
            if not heads.reads_only:
                widths |= {"self_attn.k_proj": keys}
            if not heads.reads_only and not heads.keys_are_values:
                widths |= {"self_attn.v_proj": keys}
            (out,) = self._products(number, {"self_attn.o_proj": layer.out.outputs}, (layer.out,))
            layer = layer._replace(inputs=self._products(number, widths, layer.inputs), out=out)
        if isinstance(mlp := layer.mlp, Gated):
            half = sum(linear.outputs for linear in mlp.gate_up) // 2
            gate_up = self._products(number, {"mlp.gate_proj": half, "mlp.up_proj": half}, mlp.gate_up)
            (down,) = self._products(number, {"mlp.down_proj": mlp.down.outputs}, (mlp.down,))
            layer = layer._replace(mlp=mlp._replace(gate_up=gate_up, down=down))
        return layer

    def _products(
        self, number: int, widths: Mapping[str, int], linears: tuple[Linear, ...]
    ) -> tuple[Linear, ...]:
        """Products with factors: those of the modules with these outputs, joined or not."""
        joined = [list(widths)] if len(linears) == 1 else [[module] for module in widths]
        return tuple(
            self._product(number, {module: widths[module] for module in modules}, linear)
            for modules, linear in zip(joined, linears, strict=True)
        )

    def _product(self, number: int, widths: Mapping[str, int], linear: Linear) -> Linear:
        given = [[lora.pairs.get((number, module)) for module in widths] for lora in self._loras]
        self.left -= {(lora.name, number, module) for lora in self._loras for module in widths}
        if all(pair is None for pairs in given for pair in pairs):
            return linear
        down, up = _stack(given, list(widths.values()), linear)
        self.bytes += down.nbytes + up.nbytes
        return linear._replace(down=down, up=up)


def _stack(given: Sequence[Sequence[Pair | None]], widths: Sequence[int], linear: Linear) -> tuple[Any, Any]:
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
        return down, up
    stacked = mx.array(down).astype(linear.dtype), mx.array(up).astype(linear.dtype)
    mx.eval(stacked)
    return stacked
