"""An encoder with its pooling: texts to vectors, layer by layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from zmqengine.checkpoint.encoder_batch import batch_bytes
from zmqengine.checkpoint.recipe import Recipe
from zmqengine.engine.embedding.backend import Backend, ReplayBounds
from zmqengine.engine.embedding.dense import Dense
from zmqengine.engine.embedding.encoders import bert, gemma3, modernbert, nomic
from zmqengine.engine.embedding.encoders.parts import Encoder, Scorer
from zmqengine.engine.embedding.packing import Packed
from zmqengine.engine.embedding.pooling import pool
from zmqengine.engine.embedding.replay import ReplayJob, Replays
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.host.environment import allows_tf32
from zmqengine.engine.models.arrays import Weights, read_arrays
from zmqengine.engine.texts.pooling import unit
from zmqengine.errors import ModelLoadError

_FAMILIES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "bert": (bert, bert.Bert),
    "gemma3": (gemma3, gemma3.Gemma3),
    "modernbert": (modernbert, modernbert.ModernBert),
    "nomic": (nomic, nomic.NomicBert),
}

ROUNDINGS_MAX = 2
"""The largest relative difference of a vector by which replays are used, in roundings of a state, for the root of the
number of layers: roundings of layers are independent. Vectors of half precision differed from those of float32 by up to
1.25, those of float32 from each other by up to 0.6; one token of 17 too many turned them by 2.3 to 10 in bfloat16, with
24 to 2 layers (random weights of four families, 2 to 24 layers)."""
_ROUNDINGS: dict[mx.Dtype, float] = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-21}
"""Roundings of a state. Sums of hundreds of products in float32 are eight times less exact than a number of it."""
_ROUNDING_TF32 = 2.0**-11
"""Rounding of the factors of a product of float32 in TF32."""
_COMPARED_LENGTHS = (3, 17, 40)

log = logging.getLogger("zmqengine.engine")


class TextEncoder:
    """A `VectorModel` on an encoder of our own. `context_tokens`: the most tokens that it has positions for."""

    def __init__(
        self,
        encoder: Encoder,
        recipe: Recipe,
        dense: Sequence[Dense],
        context_tokens: int,
        backend: Backend,
    ) -> None:
        self._encoder = encoder
        self._recipe = recipe
        self._dense = dense
        self._attention = backend.attention
        self.tokens_max = backend.tokens_max
        config = recipe.config
        self.width = recipe.labels or (dense[-1].width if dense else int(config["hidden_size"]))
        self._replays: Replays | None = None
        if backend.replays is not None:
            replays = self._open_replays(backend.replays, context_tokens)
            self._replays = replays if self._agrees(replays, context_tokens) else None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a batch: the states of its tokens, and attention scores."""
        return batch_bytes(self._recipe.config, self.tokens_max)

    def padded_max(self, tokens_max: int) -> int:
        # Replays have several shapes for lengths that differ; attention of a packed batch pads to the longest text.
        return tokens_max if self._replays is None else self.tokens_max

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> TextEncoderJob | ReplayJob:
        replay = None if self._replays is None else self._replays.begin(texts, second)
        return replay or TextEncoderJob(self._encoder, self._packed(texts, second), self._vectors)

    def _packed(self, texts: Sequence[Sequence[int]], second: Sequence[int] = ()) -> Packed:
        return Packed(texts, second, self._attention)

    def _open_replays(self, bounds: ReplayBounds, context_tokens: int) -> Replays:
        arrays: dict[str, mx.array] = dict(tree_flatten(self._encoder.layers))
        layer_floats = sum(array.size for array in arrays.values()) // len(self._encoder.layers)
        is_full = any(array.dtype == mx.float32 for array in arrays.values())
        free_tokens = bounds.free_products * (1 if is_full else bounds.half_speed) // layer_floats
        return Replays(
            self._forward,
            context_tokens=context_tokens,
            free_tokens=free_tokens,
            tokens_max=self.tokens_max if bounds.fills_device else min(self.tokens_max, free_tokens),
            heads=int(self._recipe.config["num_attention_heads"]),
        )

    def _agrees(self, replays: Replays, context_tokens: int) -> bool:
        """Whether texts replayed together have the vectors of each alone, without padding."""
        vocabulary = int(self._recipe.config["vocab_size"])
        lengths = [min(length, context_tokens) for length in _COMPARED_LENGTHS]
        texts = [[1 + place * 7 % (vocabulary - 1) for place in range(length)] for length in lengths]
        alone = np.stack([np.array(self._forward(self._packed([text])))[0] for text in texts])
        try:
            job = replays.begin(texts, [])
            together = alone if job is None else job.result()
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be used
            log.warning("replays of the encoder fail", extra={"reason": str(error)[:200]})
            return False
        sizes = np.maximum(np.linalg.norm(alone, axis=1), 1.0)
        difference = float((np.linalg.norm(together - alone, axis=1) / sizes).max())
        if not difference <= self._difference_max():
            log.warning("replays of the encoder differ and are not used", extra={"difference": difference})
            return False
        return True

    def _difference_max(self) -> float:
        """The largest relative difference of a vector that rounding explains."""
        dtype = self._encoder.start(self._packed([[0]])).dtype
        rounding = _ROUNDING_TF32 if dtype == mx.float32 and allows_tf32() else _ROUNDINGS[dtype]
        return ROUNDINGS_MAX * rounding * math.sqrt(len(self._encoder.layers))

    def _forward(self, batch: TextBatch) -> mx.array:
        states = self._encoder.start(batch)
        for layer in self._encoder.layers:
            states = layer(states, batch)
        return self._vectors(self._encoder.finish(states), batch)

    def _vectors(self, hidden: mx.array, batch: TextBatch) -> mx.array:
        if self._recipe.is_reranker:
            # A recipe of a reranker has a head. A check by `isinstance` fails from Python 3.12 on, which does not see
            # the layers of a module of MLX.
            return cast("Scorer", self._encoder).score(hidden, batch).astype(mx.float32)
        pooled = pool(hidden, batch, self._recipe.pooling or "mean")
        for dense in self._dense:
            pooled = dense(pooled)
        return unit(pooled)


class TextEncoderJob:
    """One batch through an encoder: a part is a layer, or several where few tokens leave time for them."""

    def __init__(
        self, encoder: Encoder, packed: Packed, vectors: Callable[[mx.array, TextBatch], mx.array]
    ) -> None:
        self._encoder = encoder
        self._packed = packed
        self._vectors = vectors
        self._states = encoder.start(packed)
        self._layer = 0

    @property
    def is_launched(self) -> bool:
        """Whether the last layer was launched."""
        return self._layer == len(self._encoder.layers)

    def step(self, tokens_max: int) -> int:
        """The next layers; the last one makes the vectors too. Returns their share of the batch's tokens."""
        tokens, layers = len(self._packed.ids), self._encoder.layers
        before = self._layer
        self._layer = min(len(layers), before + max(1, tokens_max * len(layers) // tokens))
        for layer in layers[before : self._layer]:
            self._states = layer(self._states, self._packed)
        if self.is_launched:
            self._states = self._vectors(self._encoder.finish(self._states), self._packed)
            mx.async_eval(self._states)  # type: ignore[no-untyped-call]
        else:
            mx.eval(self._states)
        return max(1, tokens * (self._layer - before) // len(layers))

    def result(self) -> np.ndarray:
        """The vectors, once they are computed."""
        return np.array(self._states)


def load_encoder(directory: Path, recipe: Recipe, backend: Backend) -> tuple[Encoder, int, int]:
    """The encoder of a checkpoint with its arrays, as the back-end stores them.

    Beside it the most tokens that its positions allow, and the bytes of its arrays.

    Raises `ModelLoadError` for arrays that are missing or of another shape.
    """
    family, build = _FAMILIES[recipe.family]
    head = {"labels": recipe.labels} if recipe.labels else {}
    encoder = build(recipe.config, activations=backend.activations, **head)
    found = family.arrays(read_arrays(directory), recipe.labels)
    _quantize_as(found, encoder, recipe.config.get("quantization") or {})
    try:
        encoder.load_weights(list(found.items()), strict=True)
    except ValueError as error:
        raise ModelLoadError(
            f"the arrays in {directory} are not those of its config.json: {error}"
        ) from error
    backend.store(encoder)
    mx.eval(encoder.parameters())
    encoder.eval()
    arrays: dict[str, mx.array] = dict(tree_flatten(encoder.parameters()))
    parameter_bytes = sum(array.nbytes for array in arrays.values())
    return encoder, family.context_tokens(recipe.config), parameter_bytes


def _quantize_as(found: Weights, encoder: Any, quantization: dict[str, Any]) -> None:
    """Make those modules of `encoder` quantized whose arrays are. Raises `ModelLoadError` where no config says how."""
    quantized = {name.removesuffix(".scales") for name in found if name.endswith(".scales")}
    if not quantized:
        return
    try:
        bits, group_size = int(quantization["bits"]), int(quantization["group_size"])
    except KeyError as error:
        raise ModelLoadError(
            f"config.json: the arrays are quantized, and quantization lacks {error}"
        ) from error
    quantize(
        encoder, group_size, bits, mode=quantization.get("mode", "affine"),
        class_predicate=lambda name, _: name in quantized,
    )  # fmt: skip
