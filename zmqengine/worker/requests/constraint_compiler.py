"""Compiler of constraints into grammars, on threads beside the actor, with a cache of the latest."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict

import msgspec
from llguidance import LLTokenizer

from zmqengine.engine.grammar.grammar import Grammar, compile_grammar, vocabulary
from zmqengine.engine.interface import ModelInfo
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint

GRAMMARS_MAX = 256
"""Compiled grammars kept, for requests with the same constraint."""


class ConstraintCompiler:
    """Compiles and caches grammars of one model. Any thread may call it."""

    def __init__(self, tokenizer_json: bytes, model: ModelInfo) -> None:
        self._tokenizer_json = tokenizer_json
        self._model = model
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()

    def warm_up(self) -> None:
        """Build the vocabulary table ahead of the first request. Never raises: `compile` reports the error."""
        with contextlib.suppress(BadRequest):
            self._tokens()

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint. Raises `BadRequest` that says what is wrong or cannot be enforced."""
        contents = [constraint.kind, constraint.text, constraint.choices, constraint.after]
        key = hashlib.blake2b(msgspec.msgpack.encode(contents), digest_size=16).digest()
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
        if grammar is None:
            grammar = compile_grammar(
                self._tokens(), constraint.kind, constraint.text, constraint.choices, constraint.after
            )
            with self._lock:
                self._grammars[key] = grammar
                while len(self._grammars) > GRAMMARS_MAX:
                    self._grammars.popitem(last=False)
        return grammar

    def _tokens(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                model = self._model
                self._vocabulary = vocabulary(
                    self._tokenizer_json,
                    vocab_size=model.vocab_size,
                    eos_token_ids=sorted(model.eos_token_ids),
                )
            return self._vocabulary
