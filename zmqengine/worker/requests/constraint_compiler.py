"""Compiles constraints for the worker's model on threads beside the actor."""

from __future__ import annotations

import contextlib
import threading

import msgspec
from llguidance import LLTokenizer

from zmqengine.engine.grammar.grammar import Grammar, compile_grammar, vocabulary
from zmqengine.engine.grammar.thinking import ThinkingBound, thinking_bound
from zmqengine.engine.interface import ModelInfo
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint, ThinkingMax


class ConstraintCompiler:
    """The constraint compiler of one model; any thread may call it."""

    def __init__(self, tokenizer_json: bytes, model: ModelInfo) -> None:
        self._tokenizer_json = tokenizer_json
        self._model = model
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    def warm_up(self) -> None:
        """Build the vocabulary table. Never raises: the first request that needs it gets the error."""
        with contextlib.suppress(BadRequest):
            self._tokens()

    def compile(self, constraint: Constraint) -> Grammar:
        """A grammar for one request.

        Raises `BadRequest` for a constraint that is malformed, too complex or cannot be enforced.
        """
        tokens = self._tokens()
        return compile_grammar(tokens, constraint.kind, constraint.text, constraint.choices, constraint.after)

    def bound_thinking(self, given: ThinkingMax) -> ThinkingBound:
        """A bound on reasoning whose markers are found by their text, if the tokenizer can be read."""
        vocabulary = None
        with contextlib.suppress(BadRequest):
            vocabulary = self._tokens()
        return thinking_bound(**msgspec.structs.asdict(given), vocabulary=vocabulary)

    def _tokens(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary(
                    self._tokenizer_json,
                    vocab_size=self._model.vocab_size,
                    eos_token_ids=sorted(self._model.eos_token_ids),
                )
            return self._vocabulary
