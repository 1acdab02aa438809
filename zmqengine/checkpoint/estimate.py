"""Estimates whether a model fits in memory, and with how many chats of a given length."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from zmqengine.checkpoint.cache_shape import ConfigShape, shape_of
from zmqengine.checkpoint.encoder_batch import TOKENS_MAX_CPU, TOKENS_MAX_GPU, batch_bytes
from zmqengine.checkpoint.head_files import missing_head
from zmqengine.checkpoint.recipe import MISSHAPEN, Recipe, read_recipe
from zmqengine.checkpoint.supported import why_not_supported
from zmqengine.checkpoint.vision import why_blind
from zmqengine.checkpoint.weights import CheckpointError, Weights, read_weights

ACTIVATION_SHARE = 0.1
"""Share of the memory limit that a worker keeps free for activations."""
CHAT_TOKENS = (2_048, 8_192, 32_768, 131_072)
LEAST_TOKENS = 8_192
"""Tokens of the one chat that a model must have room for beside its weights, or it is of no use."""
PADDING_BYTES_MIN = 64 << 20
"""Least bytes that an engine sets aside for the padding of its batches, however small the model is."""
IMAGE_BYTES_MIN = 144 << 20
"""Bytes that a vision tower takes for a small image: twice 64 MiB of attention scores, and a tile's features."""


@dataclass(frozen=True, slots=True)
class ModelCheckpoint:
    """A model on disk. `quantisation` is empty for one that is not quantised; `capabilities` are in Ollama's words.

    `encoder` is the config of a model that only encodes texts, else None. `missing_head`: a line about one whose config
    promises a head that drafts, and whose files lack it.
    """

    directory: Path
    model_type: str
    quantisation: str
    weights: Weights
    shape: ConfigShape
    capabilities: tuple[str, ...]
    encoder: Mapping[str, Any] | None = None
    missing_head: str = ""

    def kv_budget(self, limit_bytes: int) -> int:
        """Bytes that a limit leaves for KV caches; negative if not even the weights fit."""
        return int(limit_bytes * (1 - ACTIVATION_SHARE)) - self.weights.total_bytes

    def need_bytes(self, context_max: int | None = None, *, on_gpu: bool) -> int:
        """Bytes that a worker needs at least: weights, one chat of `LEAST_TOKENS`, one image for a model that sees,
        padding, and activations; those of an encoder are the largest batch of texts, which is another on a GPU."""
        if self.encoder is not None:
            batch = batch_bytes(self.encoder, TOKENS_MAX_GPU if on_gpu else TOKENS_MAX_CPU)
            weights = self.weights.total_bytes
            return max(weights + batch, int(weights / (1 - ACTIVATION_SHARE)))
        tokens = min(LEAST_TOKENS, self.shape.context_tokens, context_max or LEAST_TOKENS)
        held = self.weights.total_bytes + self.shape.bytes_for(tokens, self.weights.float_bytes)
        held += PADDING_BYTES_MIN
        if "vision" in self.capabilities:
            # An engine gives images half of what is left, and KV caches the other.
            held += 2 * IMAGE_BYTES_MIN
        return int(held / (1 - ACTIVATION_SHARE))

    def chats(self, limit_bytes: int, tokens: int) -> int | None:
        """The number of chats of this length that fit at once; None for caches that do not grow."""
        each = self.shape.bytes_for(tokens, self.weights.float_bytes)
        return max(0, self.kv_budget(limit_bytes)) // each if each else None

    def lengths(self) -> list[int]:
        """Chat lengths to report: usual ones within the context, and the context itself, in tokens."""
        context = self.shape.context_tokens
        return [*(tokens for tokens in CHAT_TOKENS if tokens < context), context]


def open_checkpoint(directory: Path) -> ModelCheckpoint:
    """Read config.json and the headers of the weights. Raises `CheckpointError`, also for a type that none loads."""
    file = directory / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no config.json: it is not a model in mlx-lm's format"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    try:
        return _described(directory, config)
    except MISSHAPEN as error:
        raise CheckpointError(f"a JSON file in {directory} is not of a model's form: {error}") from None


def _described(directory: Path, config: dict[str, Any]) -> ModelCheckpoint:
    if reason := why_not_supported(directory, config):
        raise CheckpointError(reason)
    recipe = read_recipe(directory)
    shape = shape_of(config)
    return ModelCheckpoint(
        directory=directory,
        model_type=str(config.get("model_type", "unknown")),
        quantisation=_quantisation(config),
        weights=read_weights(directory),
        shape=_without_cache(shape) if recipe.family else shape,
        capabilities=tuple(_capabilities(directory, config, recipe)),
        encoder=recipe.config if recipe.family else None,
        missing_head=missing_head(directory, config),
    )


def _capabilities(directory: Path, config: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    if not recipe.is_reranker:
        yield "embedding" if recipe.family else "completion"
    if isinstance(config.get("vision_config"), dict) and why_blind(directory) is None:
        yield "vision"
    # A template that names tools renders them.
    if any(re.search(r"\btools\b", text) for text in _templates(directory)):
        yield "tools"


def _templates(directory: Path) -> Iterator[str]:
    """The chat templates of a checkpoint, as text or as the JSON that has them."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        with contextlib.suppress(OSError):
            yield (directory / name).read_text("utf-8", "replace")


def _without_cache(shape: ConfigShape) -> ConfigShape:
    """The shape of an encoder, which keeps nothing of a text."""
    return replace(shape, full_layers=0, sliding_layers=0, fixed_layers=0)


def _quantisation(config: Mapping[str, Any]) -> str:
    quantisation = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return ""
    bits, mode = quantisation.get("bits"), quantisation.get("mode") or quantisation.get("quant_method") or ""
    return f"{bits}-bit" if bits else str(mode)
