"""From a checkpoint to an engine of texts: an encoder of our own, or the layers of a model that generates."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from zmqengine.checkpoint.recipe import Recipe
from zmqengine.engine.embedding.backend import Backend
from zmqengine.engine.embedding.dense import load_dense
from zmqengine.engine.embedding.encoder_model import TextEncoder, load_encoder
from zmqengine.engine.embedding.engine import EmbeddingEngine
from zmqengine.engine.host.device_memory import limit_mlx, recommended_bytes
from zmqengine.engine.host.environment import choose_tf32_of_encoders
from zmqengine.engine.host.host_heap import keep_freed_arrays
from zmqengine.engine.interface import ModelInfo
from zmqengine.engine.load.probe import hidden_width
from zmqengine.engine.load.tokenizer_export import ExportedTokenizer
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.engine.texts.pooling import Pooling
from zmqengine.errors import ModelLoadError

log = logging.getLogger("zmqengine.engine")

Report = Callable[[str, "float | None"], None]


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """A loaded encoder, as `open.OpenedEngine` is for models that generate."""

    engine: EmbeddingEngine
    tokenizer: ExportedTokenizer
    memory_limit_bytes: int
    facts: dict[str, str]


def open_encoder(
    directory: Path,
    recipe: Recipe,
    *,
    backend: Backend,
    name: str,
    options: EngineOptions,
    limit_memory: Callable[[int, int], int],
    report: Report,
) -> OpenedEncoder:
    """Load the encoder in `directory`, to be known as `name`, on this thread. Raises `ModelLoadError`."""
    tf32 = choose_tf32_of_encoders()
    recommended = recommended_bytes()
    mx.set_memory_limit(recommended)
    report("reading the tokenizer", None)
    tokenizer = read_tokenizer(directory, recipe)
    report("reading weights", None)
    try:
        encoder, context_tokens, parameter_bytes = load_encoder(directory, recipe, backend)
        dense = [load_dense(path) for path in recipe.dense]
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"{directory}: config.json lacks {error} for a {recipe.family}") from error
    if not backend.is_gpu:
        keep_freed_arrays()
    limit = limit_memory(recommended, parameter_bytes)
    limit_mlx(limit, parameter_bytes)
    report("comparing vectors", None)
    model = TextEncoder(encoder, recipe, dense, context_tokens, backend)
    info = ModelInfo(
        name=name,
        vocab_size=int(recipe.config["vocab_size"]),
        context_tokens=min(context_tokens, recipe.tokens_max or context_tokens),
        eos_token_ids=frozenset(),
        parameter_bytes=parameter_bytes,
        generates=False,
        dimensions=0 if recipe.is_reranker else model.width,
        labels=recipe.labels,
    )
    facts = {
        "engine": "encoder",
        "family": recipe.family,
        "pooling": "head" if recipe.is_reranker else recipe.pooling or "mean",
        "model_path": str(directory),
        "device": backend.name,
    }
    if tf32 is not None:
        facts[tf32.name] = f"{tf32.value} (set {tf32.by})"
    return OpenedEncoder(
        EmbeddingEngine(
            model, info, rows_max=options.rows_max, step_s=options.prefill_s, is_gpu=backend.is_gpu
        ),
        tokenizer,
        limit,
        facts,
    )


def read_texts(engine: MlxEngine, runner: ModelRunner, recipe: Recipe) -> None:
    """Let `engine` take texts, if the model of its `runner` gives hidden states."""
    width = hidden_width(runner)
    if not width:
        log.info(
            "this model makes no embeddings: it gives no hidden states", extra={"model": engine.info.name}
        )
        return
    dense = [load_dense(path) for path in recipe.dense]
    engine.read_texts(Pooling(recipe.pooling or "mean", dense), dense[-1].width if dense else width)


def read_tokenizer(directory: Path, recipe: Recipe) -> ExportedTokenizer:
    """The tokenizer of an encoder, which has no chat template. Raises `ModelLoadError`."""
    try:
        tokenizer_json = (directory / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{directory} has no tokenizer.json: the model needs a fast tokenizer"
        ) from error
    digest = hashlib.sha256(tokenizer_json + json.dumps(recipe.facts, sort_keys=True).encode())
    return ExportedTokenizer(tokenizer_json, None, [], {}, recipe.facts, digest.hexdigest())
