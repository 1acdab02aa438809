"""Small random checkpoints on disk, from the cases in `data/`, and engines of texts on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.embedding.make_vectors import array_of
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.embedding.backend import Backend
from zmqengine.engine.embedding.opening import open_encoder, read_texts
from zmqengine.engine.interface import Engine, RowFailure, TextsRequest, VectorEngine
from zmqengine.engine.options import EngineOptions

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))


def case(name: str) -> dict[str, Any]:
    """One case of `data/`."""
    return dict(json.loads((DATA / f"{name}.json").read_text()))


def write(directory: Path, given: dict[str, Any]) -> Path:
    """The checkpoint of a case, as it would be published, with a tokenizer of one word an id."""
    arrays = {
        key: mx.array(array_of(key, shape, given["seed"]))
        for key, shape in given["shapes"].items()
        if not key.endswith("position_ids")
    }
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(given["config"]))
    vocabulary = {f"w{id_}": id_ for id_ in range(given["config"]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if given["pooling"] is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": given["pooling"]}))
    return directory


def engine_of(directory: Path, backend: Backend | None = None) -> Any:
    """The engine of a checkpoint, as a worker opens it; an encoder on `backend` where it is given."""
    from zmqengine.engine.open import find_encoder_backend, open_mlx_engine

    recipe = read_recipe(directory)
    if recipe.family:
        return open_encoder(
            directory,
            recipe,
            backend=backend or find_encoder_backend(),
            name="e",
            options=EngineOptions(rows_max=8),
            limit_memory=lambda most, _: most,
            report=lambda *_: None,
        ).engine
    opened = open_mlx_engine(str(directory), EngineOptions(warm_up_s=0, speculate="off"), name="d")
    read_texts(opened.engine, opened.runner, recipe)
    return opened.engine


def run(
    engine: Engine | VectorEngine, requests: Sequence[TextsRequest]
) -> tuple[dict[int, np.ndarray], list[RowFailure]]:
    """The vectors of each row, and failures, after as many steps as it takes."""
    failures = engine.embed(requests)
    made: dict[int, list[np.ndarray]] = {}
    open_rows = {request.row for request in requests} - {failure.row for failure in failures}
    while open_rows:
        result = engine.next()
        for row, vectors, is_whole in result.vectors:
            made.setdefault(row, []).extend(vectors)
            if is_whole:
                open_rows.discard(row)
        failures += result.failures
        open_rows -= {failure.row for failure in result.failures}
    return {row: np.stack(vectors) for row, vectors in made.items()}, failures
