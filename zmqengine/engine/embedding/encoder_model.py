"""An encoder with its pooling: texts to vectors, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten

from zmqengine.checkpoint.encoder_batch import TOKENS_MAX_CPU, TOKENS_MAX_GPU, batch_bytes
from zmqengine.checkpoint.recipe import Recipe
from zmqengine.engine.embedding.dense import Dense
from zmqengine.engine.embedding.encoders import bert, gemma3, modernbert, nomic
from zmqengine.engine.embedding.encoders.parts import Encoder, Scorer
from zmqengine.engine.embedding.packing import Packed
from zmqengine.engine.embedding.pooling import pool
from zmqengine.engine.embedding.product import Product
from zmqengine.engine.embedding.ragged import Ragged
from zmqengine.engine.embedding.replay import RaggedJob, RaggedReplays, ReplayJob, Replays
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.host.backend import on_cuda, on_gpu
from zmqengine.engine.host.environment import allows_tf32
from zmqengine.engine.models.arrays import Weights, read_arrays
from zmqengine.engine.models.text_ops import TextKernels
from zmqengine.engine.texts.pooling import unit
from zmqengine.errors import ModelLoadError

_FAMILIES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "bert": (bert, bert.Bert),
    "gemma3": (gemma3, gemma3.Gemma3),
    "modernbert": (modernbert, modernbert.ModernBert),
    "nomic": (nomic, nomic.NomicBert),
}

FREE_PRODUCTS_CUDA, FREE_PRODUCTS_METAL = 4_000_000_000, 300_000_000
"""Products of numbers in a layer, of tokens with weights in float32, that take about the 0.13 ms in which the host
launches a layer's 20 operations: on an H100 (67 TFLOP/s), and on a small GPU of Apple (5 TFLOP/s, not tried)."""
_HALF_SPEED = 8
"""Factor of that on CUDA for weights of fewer bits: tensor cores make 990 TFLOP/s at best, and seldom more than half of
it."""

DIFFERENCE_MAX = 0.05
"""Relative difference of vectors, above which replays are not used. Rounding in bfloat16 stays below it; a mask or a
position that is out of place does not."""
_COMPARED_LENGTHS = (3, 17, 40)

log = logging.getLogger("zmqengine.engine")


class TextEncoder:
    """A `VectorModel` on an encoder of our own."""

    def __init__(
        self, encoder: Encoder, recipe: Recipe, dense: Sequence[Dense], context_tokens: int, *, on_gpu: bool
    ) -> None:
        self._encoder = encoder
        self._recipe = recipe
        self._dense = dense
        self.tokens_max = TOKENS_MAX_GPU if on_gpu else TOKENS_MAX_CPU
        config = recipe.config
        self.width = recipe.labels or (dense[-1].width if dense else int(config["hidden_size"]))
        self._context_tokens = context_tokens
        self._replays: RaggedReplays | Replays | None = None
        if on_gpu:
            self._replays = next(filter(self._agrees, self._every_replays()), None)
            # The kernels for products have no other precision.
            if isinstance(self._replays, RaggedReplays) and allows_tf32():
                self._replays.tune()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a batch: the states of its tokens, and attention scores."""
        return batch_bytes(self._recipe.config, self.tokens_max)

    def padded_max(self, tokens_max: int) -> int:
        # Replays have several shapes for lengths that differ; attention of a packed batch pads to the longest text.
        return tokens_max if self._replays is None else self.tokens_max

    def begin(
        self, texts: Sequence[Sequence[int]], second: Sequence[int]
    ) -> TextEncoderJob | ReplayJob | RaggedJob:
        replay = None if self._replays is None else self._replays.begin(texts, second)
        return replay or TextEncoderJob(self._encoder, Packed(texts, second), self._vectors)

    def _every_replays(self) -> Iterator[RaggedReplays | Replays]:
        """Replays for this device and this encoder, the fastest first."""
        heads = int(self._recipe.config["num_attention_heads"])
        if on_cuda():
            from zmqengine.engine.cuda import text_kernels

            if self._fits(text_kernels, heads):
                in_one = self._in_one_kernel(text_kernels)
                yield RaggedReplays(self._forward, text_kernels, heads=heads, in_one=in_one)
        arrays: dict[str, mx.array] = dict(tree_flatten(self._encoder.layers))
        layer_floats = sum(array.size for array in arrays.values()) // len(self._encoder.layers)
        is_full = any(array.dtype == mx.float32 for array in arrays.values())
        free_products = FREE_PRODUCTS_METAL
        if on_cuda():
            free_products = FREE_PRODUCTS_CUDA * (1 if is_full else _HALF_SPEED)
        free_tokens = free_products // layer_floats
        yield Replays(
            self._forward,
            context_tokens=self._context_tokens,
            free_tokens=free_tokens,
            # On CUDA a shape that is new costs more than padding: MLX makes new graphs and finds no freed buffers.
            tokens_max=self.tokens_max if on_cuda() else min(self.tokens_max, free_tokens),
            heads=heads,
        )

    def _agrees(self, replays: RaggedReplays | Replays) -> bool:
        """Whether texts replayed together have the vectors of each alone, without padding."""
        vocabulary = int(self._recipe.config["vocab_size"])
        lengths = [min(length, self._context_tokens) for length in _COMPARED_LENGTHS]
        texts = [[1 + place * 7 % (vocabulary - 1) for place in range(length)] for length in lengths]
        wanted = np.stack([np.array(self._forward(Packed([text])))[0] for text in texts])
        try:
            job = replays.begin(texts, [])
            got = wanted if job is None else job.result()
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be used
            log.warning("replays of the encoder fail", extra={"reason": str(error)[:200]})
            return False
        difference = float(np.linalg.norm(got - wanted) / max(1.0, float(np.linalg.norm(wanted))))
        if not difference <= DIFFERENCE_MAX:
            log.warning("replays of the encoder differ and are not used", extra={"difference": difference})
            return False
        return True

    def _fits(self, kernels: TextKernels, heads: int) -> bool:
        """Whether the kernels support this encoder. In half precision MLX has its own."""
        states, config = self._encoder.start(Packed([[0]])), self._recipe.config
        width = int(config.get("head_dim") or states.shape[1] // heads)
        return states.dtype == mx.float32 and kernels.supports(width)

    def _forward(self, batch: TextBatch) -> mx.array:
        states = self._encoder.start(batch)
        for layer in self._encoder.layers:
            states = layer(states, batch)
        return self._vectors(self._encoder.finish(states), batch)

    def _in_one_kernel(self, kernels: TextKernels) -> Callable[[Ragged], mx.array] | None:
        """`_forward` with all layers in one kernel; None for an encoder that the kernel does not support."""
        encoder = self._encoder
        stack = encoder.stack() if isinstance(encoder, bert.Bert) else None
        if stack is None or not kernels.stacks(stack):
            return None

        def forward(batch: Ragged) -> mx.array:
            sums = batch.layers(encoder.start(batch), stack)
            return self._vectors(encoder.layers[-1].norm(sums), batch)

        return forward

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


def load_encoder(directory: Path, recipe: Recipe) -> tuple[Encoder, int, int]:
    """The encoder of a checkpoint with its arrays, as they are on a GPU and else in float32.

    Beside it the most tokens that its positions allow, and the bytes of its arrays.

    Raises `ModelLoadError` for arrays that are missing or of another shape.
    """
    family, build = _FAMILIES[recipe.family]
    encoder = build(recipe.config, recipe.labels) if recipe.labels else build(recipe.config)
    found = family.arrays(read_arrays(directory), recipe.labels)
    _quantize_as(found, encoder, recipe.config.get("quantization") or {})
    try:
        encoder.load_weights(list(found.items()), strict=True)
    except ValueError as error:
        raise ModelLoadError(
            f"the arrays in {directory} are not those of its config.json: {error}"
        ) from error
    if not on_gpu():
        encoder.set_dtype(mx.float32)
    _turn_products(encoder, copy=not on_gpu())
    if isinstance(encoder, bert.Bert):
        encoder.fold_biases()
    mx.eval(encoder.parameters())
    encoder.eval()
    arrays: dict[str, mx.array] = dict(tree_flatten(encoder.parameters()))
    parameter_bytes = sum(array.nbytes for array in arrays.values())
    return encoder, family.context_tokens(recipe.config), parameter_bytes


def _turn_products(encoder: Any, *, copy: bool) -> None:
    """Make linear layers products with weights (inputs, outputs), an operation less; with `copy` they lie so in memory.

    OpenBLAS multiplies few tokens up to 1.8 times as fast then, and many a tenth faster.
    """
    products = [
        (name, Product(module, copy=copy))
        for name, module in encoder.named_modules()
        if type(module) is Linear
    ]
    encoder.update_modules(tree_unflatten(products))


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
