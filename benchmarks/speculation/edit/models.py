"""The bundled models, loaded, and what an engine is asked of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
from tokenizers import Tokenizer

from benchmarks.speculation.edit import path
from benchmarks.speculation.edit.documents import Edit
from tools.pico.tokens import encode
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.loader import LoadedModel, evaluate, load


class Asked(NamedTuple):
    """A request, and the tokens that are the right answer to it."""

    request: RowRequest
    answer: list[int]


def load_bundled(name: str) -> LoadedModel:
    """`model` or `draft`. In float32, in which a call for several tokens chooses as calls for one do."""
    loaded = load(str(path(name)))
    loaded.model.set_dtype(mx.float32)
    return replace(loaded, info=replace(loaded.info, parameter_bytes=evaluate(loaded.model)))


def ask(loaded: LoadedModel, edits: list[Edit]) -> list[Asked]:
    """A row for each of `edits`, greedy, in the words of the models' chat template."""
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json.decode())
    return [_asked(loaded, tokenizer, row, edit) for row, edit in enumerate(edits)]


def _asked(loaded: LoadedModel, tokenizer: Tokenizer, row: int, edit: Edit) -> Asked:
    ids, learnt = encode(tokenizer, edit.chat)
    answer = ids[learnt.index(True) :]
    request = RowRequest(
        row,
        ids[: learnt.index(True)],
        len(answer) + 8,
        stop_token_ids=loaded.info.eos_token_ids,
    )
    return Asked(request, answer)
