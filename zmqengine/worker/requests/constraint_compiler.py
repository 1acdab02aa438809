"""Compiles constraints for the worker's model on threads beside the actor."""

from __future__ import annotations

import contextlib
import threading

from llguidance import LLTokenizer

from zmqengine.engine.grammar.grammar import Grammar, compile_grammar, vocabulary
from zmqengine.engine.grammar.trial_compile import Trials, VocabularySource
from zmqengine.engine.interface import ModelInfo
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint
from zmqengine.worker.requests.constraint_memory import ConstraintMemory


class ConstraintCompiler:
    """The constraint compiler of one model; any thread may call it."""

    def __init__(self, tokenizer_json: bytes, model: ModelInfo) -> None:
        self._words = VocabularySource(tokenizer_json, model.vocab_size, sorted(model.eos_token_ids))
        self._trials = Trials(self._words)
        self.memory = ConstraintMemory()
        """Memory of the constraints that were compiled here, for as long as their requests hold them."""
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    def warm_up(self) -> None:
        """Build the vocabulary table. Never raises: the first request that needs it gets the error."""
        with contextlib.suppress(BadRequest):
            self._tokens()

    def compile(self, constraint: Constraint) -> Grammar:
        """A grammar for one request.

        Raises `BadRequest` for a constraint that is malformed or cannot be enforced, and `NeverFits` or `Overloaded`
        for one that there is no memory for.
        """
        tokens = self._tokens()
        given = (constraint.kind, constraint.text, constraint.choices, constraint.after)
        compiled_bytes = self._trials.measure(*given)
        claim = self.memory.claim(compiled_bytes)
        grammar = compile_grammar(tokens, *given)
        grammar.compiled_bytes, grammar.claim = compiled_bytes, claim
        return grammar

    def _tokens(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                words = self._words
                self._vocabulary = vocabulary(
                    words.tokenizer_json, vocab_size=words.vocab_size, eos_token_ids=words.eos_token_ids
                )
            return self._vocabulary
