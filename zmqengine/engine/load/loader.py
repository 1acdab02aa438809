"""Loads a model with mlx-lm's own loader, completely and on this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import context_tokens
from zmqengine.checkpoint.on_disk import local_directory
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.checkpoint.supported import is_of_mlx_vlm, why_not_supported
from zmqengine.checkpoint.text_config import WHOLE_TYPES, is_seeing
from zmqengine.checkpoint.vision import VisionRecipe, read_vision, why_blind
from zmqengine.engine.host.device_errors import device_error
from zmqengine.engine.interface import ModelInfo
from zmqengine.engine.load.bare_checkpoint import bare_classes, is_bare
from zmqengine.engine.load.generation_config import sampling_facts
from zmqengine.engine.load.tokenizer_export import ExportedTokenizer, export_tokenizer, with_facts
from zmqengine.engine.load.vision_text import ModelClasses, classes_of, placed_classes
from zmqengine.engine.load.vlm_caches import choose_caches
from zmqengine.engine.models.mlx_lm import (
    fetch_model,
    load_config,
    load_model,
    load_tokenizer,
    model_classes,
)
from zmqengine.engine.models.mlx_vlm import VlmText, load_text_model
from zmqengine.errors import ModelLoadError

Report = Callable[[str, "float | None"], None]

# Bytes of weights evaluated at once: the steps of the reported progress.
_EVALUATED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run on this thread, and its tokenizer for front-ends."""

    model: Any
    info: ModelInfo
    tokenizer: ExportedTokenizer
    directory: Path
    vision: VisionRecipe | None = None


def load(model: str, report: Report = lambda stage, fraction: None, *, name: str = "") -> LoadedModel:
    """Load the local directory or the hub id `model`, to be known as `name`: the id or directory if empty.

    Every array of the model is evaluated on the calling thread, parameters or not, so no lazy array
    belongs to another thread's stream. `report` gets the stage and, where known, the fraction of it that is done.
    Raises `ModelLoadError`, or the device's own error if it was lost while loading.
    """
    report("finding the model", None)
    directory = find_directory(model)
    try:
        report("reading the tokenizer", None)
        recipe = read_recipe(directory)
        if reason := why_not_supported(directory, recipe.config):
            raise ModelLoadError(f"{directory}: {reason}")
        bare = is_bare(directory)
        network, config = _load_network(directory, recipe.config, bare=bare)
        eos_token_ids = config.get("eos_token_id")
        exported = export_tokenizer(load_tokenizer(directory, eos_token_ids=eos_token_ids))  # type: ignore[no-untyped-call]
        blind = why_blind(directory)
        told = {} if blind is None else {"blind": blind}
        exported = with_facts(exported, sampling_facts(directory) | recipe.facts | told)
        vision = read_vision(directory, exported.tokenizer_json)
        report("reading weights", 0.0)
        parameter_bytes = evaluate(network, lambda fraction: report("reading weights", fraction))
        if isinstance(network, VlmText):
            choose_caches(network)
        vocab_size = _try_out(network)
    except ModelLoadError:
        raise
    except Exception as error:
        fault = device_error(error)
        if fault is not None and fault.remedy == "exit":
            # Not the model's fault: the supervisor tries again.
            raise
        raise ModelLoadError(f"cannot load the model in {directory}: {one_line(error)}") from error
    info = ModelInfo(
        name=name or (directory.name if Path(model).expanduser().exists() else model),
        vocab_size=vocab_size,
        context_tokens=context_tokens(config),
        eos_token_ids=frozenset(token for token in exported.eos_token_ids if token < vocab_size),
        parameter_bytes=parameter_bytes,
        generates=not bare or recipe.config.get("tie_word_embeddings") is not False,
    )
    return LoadedModel(network, info, exported, directory, vision)


def _load_network(directory: Path, config: Mapping[str, Any], *, bare: bool) -> tuple[Any, dict[str, Any]]:
    """The network of a checkpoint, its arrays not read yet, and its config: mlx-lm's, or mlx-vlm's where mlx-lm has
    none."""
    if is_of_mlx_vlm(config):
        return load_text_model(directory)
    loaded: tuple[Any, dict[str, Any]] = load_model(
        directory,
        lazy=True,
        # Layers alone have no head: where mlx-lm wants one, it is given the embedding's.
        model_config={"tie_word_embeddings": True} if bare else {},
        get_model_classes=bare_classes if bare else _classes(directory),
    )
    return loaded


def _classes(directory: Path) -> ModelClasses:
    config = load_config(directory)
    if config.get("model_type") in WHOLE_TYPES:
        return placed_classes
    return classes_of(directory) if is_seeing(config) else model_classes


def find_directory(model: str) -> Path:
    """The local directory of `model`, fetched from the hub if it is a hub id. Raises ModelLoadError."""
    directory = local_directory(model)
    if directory is not None:
        return directory
    try:
        return Path(fetch_model(model))
    except Exception as error:
        raise ModelLoadError(
            f"there is no directory {model}, and it could not be fetched from the hub: {one_line(error)}"
        ) from error


def evaluate(model: Any, report: Callable[[float], None] = lambda fraction: None) -> int:
    """Evaluate every array that the model holds; returns the bytes of all of them."""
    found = list(find_arrays(model))
    total = sum(array.nbytes for array in found)
    done, batch, batch_bytes = 0, [], 0
    for array in found:
        batch.append(array)
        batch_bytes += array.nbytes
        if batch_bytes >= _EVALUATED_BYTES:
            mx.eval(batch)
            done += batch_bytes
            batch, batch_bytes = [], 0
            report(done / total)
    mx.eval(batch)
    report(1.0)
    return total


def find_arrays(root: Any) -> Iterator[mx.array]:
    """Every array inside `root` once: parameters, frozen buffers, tables kept in plain attributes."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            pending.extend(value)
        if hasattr(value, "__dict__") and not isinstance(value, (type, mx.array)) and _is_of_model(value):
            pending.extend(vars(value).values())


def one_line(error: BaseException) -> str:
    """An error on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _try_out(model: Any) -> int:
    """Run the model on one token; returns the size of its vocabulary."""
    logits = model(mx.array([[0]], dtype=mx.uint32))
    mx.eval(logits)
    return int(logits.shape[-1])


def _is_of_model(value: Any) -> bool:
    """Whether to search an object for arrays: modules, and plain classes of model code."""
    return not type(value).__module__.startswith(("builtins", "mlx.core"))
