"""The bundled model with what constrains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from tests.support.engines import Run, engine_options, finish, runner_of
from zmqengine.engine.grammar.grammar import Grammar, Kind, compile_grammar, vocabulary
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.load.loader import load
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.pico import model_path

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "brave"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOT = Sampling(temperature=1.0, top_p=0.9)


class Pico:
    """The bundled model, its tokenizer, and what compiles grammars for it."""

    def __init__(self) -> None:
        self.loaded = load(str(model_path()), lambda stage, fraction: None, name="pico")
        self.text = Tokenizer.from_str(self.loaded.tokenizer.tokenizer_json.decode())
        info = self.loaded.info
        self.eos = sorted(info.eos_token_ids)
        self.tokens = vocabulary(
            self.loaded.tokenizer.tokenizer_json, vocab_size=info.vocab_size, eos_token_ids=self.eos
        )

    def engine(self, model: Any = None, **options: Any) -> MlxEngine:
        return MlxEngine(
            model if hasattr(model, "forward") else runner_of(model or self.loaded.model),
            self.loaded.info,
            engine_options(options),
            **options,
        )

    def grammar(
        self, kind: Kind, text: str = "", choices: Sequence[str] = (), after: Sequence[int] = ()
    ) -> Grammar:
        return compile_grammar(self.tokens, kind, text, choices, after)

    def row(
        self, id_: int, grammar: Grammar | None, text: str = "Tell me about Tom.", **fields: Any
    ) -> RowRequest:
        fields = {"max_tokens": 200, "seed": id_, "stop_token_ids": frozenset(self.eos), **fields}
        return RowRequest(id_, self.text.encode(text).ids, grammar=grammar, **fields)

    def said(self, run: Run, row: int) -> str:
        return str(self.text.decode(run.ids(row)))


def run_all(engine: MlxEngine, rows: Sequence[RowRequest]) -> Run:
    assert engine.insert(rows) == []
    run = finish(engine)
    assert run.failures == []
    return run
