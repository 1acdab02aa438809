"""From what a request asks for to a grammar that rows can follow."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from zmqengine.engine.constraints.matcher import RowMatcher
from zmqengine.errors import BadRequest

GRAMMARS_MAX = 256
"""Compiled grammars that are kept for requests that ask for the same."""
Kind = Literal["json_schema", "json", "regex", "lark", "choice"]
# One space, or a new line and its indentation: a model that may write any white space writes nothing else when it does
# not know what to say.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,16}|\n\t{0,8})?"}
_JSON_OBJECT = {"type": "object"}


class Grammar:
    """A constraint, compiled. Any number of rows may follow it at the same time."""

    def __init__(self, template: LLMatcher, after: tuple[int, ...]) -> None:
        self._template = template
        self._after = after

    def start(self, emitted: Sequence[int]) -> RowMatcher:
        """A matcher for a row that has made `emitted` so far. Raises `ConstraintBroken` if it cannot follow that."""
        return RowMatcher(self._template.deep_copy(), self._after, emitted)


class ConstraintCompiler:
    """Compiles constraints for one model, on whatever thread asks, and keeps the latest.

    `tokenizer_json` is in the format of the `tokenizers` library; tokens from `vocab_size` on, and those that the
    tokenizer does not have, are never allowed.
    """

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def warm_up(self) -> None:
        """Build the table of the vocabulary, which takes about a second for 150,000 tokens. Never raises."""
        with contextlib.suppress(BadRequest):
            self._table()

    def compile(
        self, kind: Kind, text: str, choices: Sequence[str] = (), after: Sequence[int] = ()
    ) -> Grammar:
        """The grammar of a constraint that begins once the output has had the tokens of `after` in a row.

        Raises `BadRequest` that says what is wrong with it, or what of it cannot be enforced.
        """
        key = hashlib.blake2b(msgspec.msgpack.encode([kind, text, choices]), digest_size=16).digest()
        with self._lock:
            template = self._grammars.get(key)
            if template is not None:
                self._grammars.move_to_end(key)
        if template is None:
            template = self._compile(kind, text, choices)
            with self._lock:
                self._grammars[key] = template
                while len(self._grammars) > GRAMMARS_MAX:
                    self._grammars.popitem(last=False)
        return Grammar(template, tuple(after))

    def _compile(self, kind: Kind, text: str, choices: Sequence[str]) -> LLMatcher:
        source = _grammar_text(kind, text, choices)
        matcher = LLMatcher(self._table(), source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise BadRequest(f"constraint: {_reason(kind, matcher.get_error())}")
        return matcher

    def _table(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except Exception as error:
                    raise BadRequest(
                        f"constraint: the tokenizer of this model cannot be constrained: {error}"
                    ) from error
            return self._tokenizer


def _limits() -> LLParserLimits:
    # About 100 ms to compile and 10 ms a token at the worst: a hostile grammar ends its own row.
    return LLParserLimits(
        initial_lexer_fuel=2_000_000, step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=50_000
    )


def _grammar_text(kind: Kind, text: str, choices: Sequence[str]) -> str:
    match kind:
        case "json_schema":
            return _from_schema(_parsed(text))
        case "json":
            return _from_schema(_JSON_OBJECT)
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(text))
        case "choice":
            if not choices:
                raise BadRequest("constraint: choices is empty")
            alternatives = " | ".join(json.dumps(choice) for choice in choices)
            return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"constraint: the schema is not valid JSON: {error}") from None


def _from_schema(schema: object) -> str:
    if not isinstance(schema, dict | bool):
        raise BadRequest("constraint: a JSON schema is an object, true or false")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"constraint: {error}") from None


def _reason(kind: Kind, error: str) -> str:
    line = " ".join(error.split())[:500]
    if "Unimplemented keys" in line:
        keys = line.partition("[")[2].partition("]")[0]
        return f"the schema has keywords that cannot be enforced: {keys}"
    return f"the {kind} cannot be compiled: {line}"
