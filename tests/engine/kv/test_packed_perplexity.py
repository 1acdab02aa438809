"""The bundled model foretells held-out texts with keys and values in 8 bits."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

from tokenizers import Tokenizer

from tests.support.engines import finish
from tools.pico import corpus
from tools.pico.corpus import StoryDocument
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.pico import model_path

TEXTS = int(os.environ.get("ZMQENGINE_PACKED_TEXTS", "16"))
SEED = 3


def foretold(engine: Any, number: int, prompt: list[int], rest: list[int]) -> list[float]:
    """Log-probabilities of `rest` behind a cached prompt."""
    assert not engine.insert([RowRequest(2 * number, prompt, 1)])
    finish(engine)
    request = RowRequest(2 * number + 1, prompt, len(rest), forced=rest, logprobs=0)
    assert not engine.insert([request])
    run = finish(engine)
    assert run.cached(request.row) >= len(prompt) - 1
    return [token.logprobs.logprob for token in run.tokens[request.row] if token.logprobs is not None]


def test_perplexity_is_that_of_the_model() -> None:
    """Within a thousandth, over texts whose first half is cached."""
    documents = (each for each in corpus.documents("held_out", SEED) if isinstance(each, StoryDocument))
    stories = list(itertools.islice(documents, TEXTS))
    losses: dict[int | None, list[float]] = {None: [], 8: []}
    for bits, told in losses.items():
        opened = open_mlx_engine(str(model_path()), EngineOptions(kv_bits=bits, warm_up_s=0, speculate="off"))
        assert opened.facts.get("kv_bits", "").startswith("8 bits in slots") == (bits == 8)
        tokenizer = Tokenizer.from_buffer(opened.tokenizer.tokenizer_json)
        for number, document in enumerate(stories):
            ids = tokenizer.encode(document.text).ids
            told.extend(foretold(opened.engine, number, ids[: len(ids) // 2], ids[len(ids) // 2 :]))
        opened.engine.close()
    wide, narrow = (math.exp(-sum(told) / len(told)) for told in losses.values())
    print(f"perplexity {wide:.4f}, in 8 bits {narrow:.4f}, {len(losses[8])} tokens")
    assert abs(narrow / wide - 1) < 0.001
