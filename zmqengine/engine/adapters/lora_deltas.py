"""The products that adapters add to those of a decoder's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.adapters.lora_files import Lora, Pair
from zmqengine.engine.adapters.projections import common_name, edited
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.layers import Linear
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.ops import by_look_up, factor_type
from zmqengine.engine.models.tree import mapped, parts_of
from zmqengine.errors import ModelLoadError

_Key = tuple[int, str]


class Adapters:
    """Adapters of a decoder. `weights` are its own with the factors of all of them.

    They are constant: another set of adapters is another object, and a step in flight keeps its own. The factors of a
    new set are not computed before `computed`, but have sizes.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        digests: Mapping[str, str] = {},
        ranks: Sequence[Mapping[_Key, int]] = (),
    ) -> None:
        self.weights = weights
        self.digests = dict(digests)
        self._ranks = list(ranks)
        self._numbers = {name: number for number, name in enumerate(self.digests, start=1)}

    @property
    def bytes(self) -> int:
        """Bytes of all factors."""
        linears = parts_of(self.weights.layers, Linear)
        return sum(
            0 if each is None else each.nbytes for linear in linears for each in (linear.down, linear.up)
        )

    def added(self, lora: Lora) -> Adapters:
        """The set with one more adapter. Raises `ModelLoadError` for another model's, and for products that none may
        change."""
        pairs: dict[_Key, Pair] = {}
        for (number, module), pair in lora.pairs.items():
            if pairs.setdefault((number, common_name(module)), pair) is not pair:
                raise ModelLoadError(f"the adapter {lora.name} changes {module} of layer {number} twice")
        count, left = len(self._numbers), set(pairs)

        def add(number: int, widths: Mapping[str, int], linear: Linear) -> Linear:
            left.difference_update((number, module) for module in widths)
            given = [pairs.get((number, module)) for module in widths]
            try:
                return _with_factors(linear, count, given, list(widths.values()))
            except ValueError as error:
                raise ModelLoadError(f"the adapter {lora.name} is for another model: {error}") from None

        weights = _edited(self.weights, add)
        if left:
            names = {(number, common_name(module)): module for number, module in lora.pairs}
            number, module = min(left)
            raise ModelLoadError(
                f"the adapter {lora.name} changes {names[number, module]} of layer {number}, which no adapter may "
                "change with this model"
            )
        ranks = {key: pair.rank for key, pair in pairs.items()}
        return Adapters(weights, {**self.digests, lora.name: lora.digest}, [*self._ranks, ranks])

    def without(self, name: str) -> Adapters:
        """The set without an adapter."""
        index = self._numbers[name] - 1
        ranks = [each for at, each in enumerate(self._ranks) if at != index]
        others = mx.array([at for at in range(len(self._ranks) + 1) if at != index + 1])

        def remove(number: int, widths: Mapping[str, int], linear: Linear) -> Linear:
            if linear.down is None or linear.up is None:
                return linear
            rank = max((sum(each.get((number, module), 0) for module in widths) for each in ranks), default=0)
            if not rank:
                return linear._replace(down=None, up=None)
            down, up = _mlx(linear.down), _mlx(linear.up)
            return linear._replace(down=down[others][..., :rank], up=up[others][..., :rank, :])

        digests = {each: digest for each, digest in self.digests.items() if each != name}
        return Adapters(_edited(self.weights, remove), digests, ranks)

    def computed(self) -> Adapters:
        """The set with all factors in memory."""
        arrays = [(linear.down, linear.up) for linear in parts_of(self.weights.layers, Linear)]
        mx.eval([each for pair in arrays for each in pair if isinstance(each, mx.array)])
        return Adapters(
            self.weights._replace(layers=mapped(self.weights.layers, Linear, _settled)),
            self.digests,
            self._ranks,
        )

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

    @functools.cached_property
    def _runs(self) -> list[tuple[int, slice]]:
        """Neighbouring tokens of one adapter."""
        ends = [*(np.flatnonzero(np.diff(self._numbers)) + 1), len(self._numbers)]
        runs = [(int(self._numbers[start]), slice(start, end)) for start, end in pairwise([0, *ends])]
        return [(number, tokens) for number, tokens in runs if number]

    def chosen(self, tokens: Any) -> Deltas:
        """The products for some of the tokens, by their indices."""
        return Deltas(self._numbers[np.asarray(tokens)])

    def add(self, outputs: Any, inputs: Any, linear: Linear) -> Any:
        """The outputs of a product with what adapters add."""
        down, up = linear.down, linear.up
        if down is None or up is None:
            return outputs
        if isinstance(inputs, np.ndarray):
            for number, tokens in self._runs:
                outputs[tokens] += (inputs[tokens] @ down[number]) @ up[number]
            return outputs
        if self._is_one:
            number = int(self._numbers[0])
            if down.dtype == outputs.dtype:
                return mx.addmm(outputs, inputs @ down[number], up[number])
            return outputs + ((inputs @ down[number]) @ up[number]).astype(outputs.dtype)
        return outputs + by_look_up(inputs, linear, self.looked_up)


def _edited(
    weights: DecoderWeights, change: Callable[[int, Mapping[str, int], Linear], Linear]
) -> DecoderWeights:
    """Weights whose products went through `change`, each with its layer and its modules."""

    def each(number: int, widths: Mapping[str, int], *linears: Linear) -> tuple[Linear, ...]:
        apart = [widths] if len(linears) == 1 else [{module: width} for module, width in widths.items()]
        return tuple(change(number, own, linear) for own, linear in zip(apart, linears, strict=True))

    layers = (edited(layer, functools.partial(each, number)) for number, layer in enumerate(weights.layers))
    return weights._replace(layers=tuple(layers))


def _with_factors(linear: Linear, count: int, given: Sequence[Pair | None], widths: Sequence[int]) -> Linear:
    """A product with the factors of one more adapter behind those of `count` others, and zeros first of all."""
    rank = sum(0 if pair is None else pair.rank for pair in given)
    if not rank and linear.down is None:
        return linear
    experts = tuple(linear.weight.shape[:-2])
    dtype = mx.float32 if isinstance(linear.weight, np.ndarray) else factor_type(linear.dtype)
    down, up = _factors(linear, given, widths, dtype)
    if linear.down is None or linear.up is None:
        most = rank
        downs = mx.zeros((1 + count, *experts, linear.inputs, rank), dtype)
        ups = mx.zeros((1 + count, *experts, rank, sum(widths)), dtype)
    else:
        most = max(rank, linear.up.shape[-2])
        downs, ups = _wide(_mlx(linear.down), _mlx(linear.up), most)
    down, up = _wide(down, up, most)
    return linear._replace(down=mx.concatenate([downs, down]), up=mx.concatenate([ups, up]))


def _factors(
    linear: Linear, given: Sequence[Pair | None], widths: Sequence[int], dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """The factors [1, inputs, ranks] and [1, ranks, outputs] of a joined product: those of its modules side by side,
    each with outputs of its own."""
    experts = tuple(linear.weight.shape[:-2])
    downs = [mx.zeros((*experts, linear.inputs, 0), dtype)]
    ups = [mx.zeros((*experts, 0, sum(widths)), dtype)]
    before = 0
    for pair, width in zip(given, widths, strict=True):
        if pair is not None:
            fits = pair.down.shape == (*experts, linear.inputs, pair.rank)
            if not fits or pair.up.shape != (*experts, pair.rank, width):
                told = f"{linear.inputs} inputs and {width} outputs"
                told += f" of {experts[0]} experts" if experts else ""
                raise ValueError(f"it has {pair.down.shape} and {pair.up.shape} for {told}")
            downs.append(pair.down.astype(dtype))
            behind = sum(widths) - before - width
            ups.append(mx.pad(pair.up.astype(dtype), [(0, 0)] * (pair.up.ndim - 1) + [(before, behind)]))
        before += width
    return mx.concatenate(downs, axis=-1)[None], mx.concatenate(ups, axis=-2)[None]


def _wide(down: mx.array, up: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """Factors with zeros up to this rank."""
    more = rank - down.shape[-1]
    if not more:
        return down, up
    before = [(0, 0)] * (down.ndim - 2)
    return mx.pad(down, [*before, (0, 0), (0, more)]), mx.pad(up, [*before, (0, more), (0, 0)])


def _mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)


def _settled(linear: Linear) -> Linear:
    """A product whose factors are arrays of the kind that its weights are."""
    if linear.down is None or not isinstance(linear.weight, np.ndarray):
        return linear
    return linear._replace(down=np.asarray(linear.down), up=np.asarray(linear.up))
