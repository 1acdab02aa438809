"""Compiles a request's constraint to a grammar that a row can follow.

Bounds. A constraint is an untrusted program that runs between two steps, and every stream waits for it. Three limits of
llguidance hold in each of its operations: items of its Earley parser, fuel of its lexer, states of its lexer. One kind
of work escapes them: a run of bytes without an alternative, a million of them for `(a{1000}){1000}`, is computed to its
end before a token is chosen. `no_forcing` in the main grammar turns that off in all grammars that it refers to, and
`RowMatcher.forced` finds such runs itself, a few tokens at a time.
The number of lexer states only grows, and copies of a matcher share them: so each request compiles a grammar of its
own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from zmqengine.engine.grammar.lark_rules import check_rules
from zmqengine.engine.grammar.matcher import NOTHING, RowMatcher, reason_of
from zmqengine.engine.grammar.satisfiable import check_satisfiable
from zmqengine.engine.grammar.schema import bound_patterns, enforceable, without_inexact
from zmqengine.errors import BadRequest

Kind = Literal["json_schema", "json", "regex", "lark", "choice"]
# One space, or a new line and its indentation: with unbounded white space, a model that is uncertain may write nothing
# else.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,16}|\n\t{0,8})?"}
_SPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}
_JSON_OBJECT = {"type": "object"}
# Lexemes of Lark that may contain `%json` without being one: strings, expressions, comments. An unclosed string ends
# with its line: a scanner that gave up at the quote would read the rest again from the next one.
_LARK_LEXEME = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)++/?|(?://|#)[^\n]*|%json\s*+')
# The largest mask of an ambiguous grammar takes 3 ms at 500 items, 12 ms at 2,000 and 930 ms at 50,000 (2 cores):
# twenty such rows in one step stay below 100 ms at 500. JSON schemas are not ambiguous, but need an item for each
# alternative: 500 for 500 objects, 2,000 for 500 optional members.
_ITEMS_MAX: dict[Kind, int] = {"lark": 500}
_ITEMS_MAX_OF_OTHERS = 2_000
# A negated class, an intersection or a difference of classes.
_MAYBE_EMPTY = re.compile(r"\[\^|&&|--|\\P")
_SCHEMAS_MAX = 256
"""Schemas in one `lark` grammar, one for each tool of a request; 5,000 empty ones take seconds to compile."""
_TOO_DEEP = "the schema is nested too deep"
_MAIN = '%llguidance {"no_forcing": true}\n'


class Grammar:
    """The compiled constraint of one request; a preempted row starts it again when it resumes.

    It begins at once, or after the consecutive tokens `after`: see `compile_grammar`.
    """

    def __init__(
        self, tokens: LLTokenizer, template: LLMatcher, after: Sequence[int], *, can_draft: bool
    ) -> None:
        self._tokens = tokens
        self._template = template
        self._after = tuple(after)
        self._can_draft = can_draft
        self._kept: RowMatcher | None = None

    def keep(self, matcher: RowMatcher) -> None:
        """Keep the matcher of a row that left for the next `start`, which would otherwise fill a mask for each
        token."""
        self._kept = matcher

    def start(self, emitted: Sequence[int]) -> RowMatcher:
        """A matcher for a row with the output `emitted` so far. Raises `ConstraintBroken` if that does not follow the
        grammar."""
        kept, self._kept = self._kept, None
        if kept is None or kept.followed != list(emitted):
            kept = RowMatcher(self._tokens, self._template.deep_copy(), self._after, emitted)
        kept.can_draft = self._can_draft
        return kept


def vocabulary(tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's table of a model's tokens; takes about a second for 150,000 of them.

    `tokenizer_json` is in the format of the `tokenizers` library. Tokens that it does not have, and those from
    `vocab_size` on, are never allowed. Raises `BadRequest` for a tokenizer that llguidance cannot read.
    """
    try:
        return LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:
        raise BadRequest(f"constraint: the tokenizer of this model cannot be constrained: {error}") from error


def compile_grammar(
    tokens: LLTokenizer, kind: Kind, text: str, choices: Sequence[str] = (), after: Sequence[int] = ()
) -> Grammar:
    """The grammar of a constraint and its first mask, mostly without the GIL.

    It begins after the text of `after`, in whatever tokens the model writes it. Special tokens have no text: with one
    among them, the grammar begins after exactly these tokens. Until then end tokens are masked.

    Raises `BadRequest` for a constraint that is malformed, cannot be enforced, is too complex, or matches nothing.
    """
    answer, marker = _grammar_of(tokens, kind, text, choices), _text_of(tokens, after)
    matcher = _compiled(tokens, kind, answer, "start: @answer")
    first = matcher.deep_copy()
    can_draft = _rolls_back(first, _first_mask(tokens, kind, first))
    if marker:
        free = f"before[suffix={json.dumps(marker, ensure_ascii=False)}]: /(?s:.*)/"
        matcher = _compiled(tokens, kind, answer, f"start: before @answer\n{free}")
    return Grammar(tokens, matcher, () if marker else after, can_draft=can_draft)


def _compiled(tokens: LLTokenizer, kind: Kind, answer: dict[str, Any], start: str) -> LLMatcher:
    main = {"name": "main", "lark_grammar": _MAIN + start}
    grammars = json.dumps({"grammars": [main, {**answer, "name": "answer"}]})
    # A string of 2,000 characters under a pattern makes some 6,000 states, nearly all of them in masks, which try every
    # token. 50,000 take 64 MB until the request ends.
    limits = LLParserLimits(
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=50_000,
        step_max_items=_ITEMS_MAX.get(kind, _ITEMS_MAX_OF_OTHERS),
        max_lexer_states=50_000,
    )
    matcher = LLMatcher(tokens, grammars, log_level=0, limits=limits)
    if matcher.is_error():
        raise BadRequest(f"constraint: {_reason(kind, matcher.get_error())}")
    return matcher


def _first_mask(tokens: LLTokenizer, kind: Kind, matcher: LLMatcher) -> np.ndarray:
    """Whether each token may be the first, 0 or 1. Raises `BadRequest` if none may, or if it is too complex to tell."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error() and NOTHING not in matcher.get_error():
        raise BadRequest(f"constraint: {_reason(kind, matcher.get_error())}")
    allowed = np.unpackbits(mask, bitorder="little")[: tokens.vocab_size]
    if not matcher.is_accepting() and not set(np.flatnonzero(allowed).tolist()) - set(tokens.eos_tokens):
        raise BadRequest(f"constraint: the {kind} matches nothing")
    return allowed


def _rolls_back(matcher: LLMatcher, first: np.ndarray) -> bool:
    """Whether draft tokens can be taken back; not where any lexeme of Lark has `stop` or `max_tokens`.

    Tries it with a token that `first` allows.
    """
    matcher.consume_token(int(first.argmax()))
    return bool(matcher.rollback(1))


def _grammar_of(tokens: LLTokenizer, kind: Kind, text: str, choices: Sequence[str]) -> dict[str, Any]:
    """The constraint as one of llguidance's grammars, by its kind."""
    match kind:
        case "json_schema":
            return {"json_schema": _schema(_parsed(text))}
        case "json":
            return {"json_schema": _schema(_JSON_OBJECT)}
        case "regex":
            grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
            return grammar
        case "lark":
            lark = _with_schemas(text)
            try:
                check_rules(
                    lark, functools.partial(_is_empty, tokens), functools.partial(_matches_nothing, tokens)
                )
            except ValueError as error:
                raise BadRequest(f"constraint: {error}") from None
            return {"lark_grammar": lark}
        case "choice":
            if not choices:
                raise BadRequest("constraint: choices is empty")
            return {"lark_grammar": f"start: {' | '.join(map(json.dumps, choices))}"}


def _is_empty(tokens: LLTokenizer, regex: str) -> bool:
    """Whether a regular expression within a grammar matches nothing. Only a class of characters can be the reason."""
    if not _MAYBE_EMPTY.search(regex):
        return False
    return _allows_nothing(LLMatcher(tokens, LLMatcher.grammar_from_regex(regex), log_level=0))


def _matches_nothing(tokens: LLTokenizer, lark: str) -> bool:
    """Whether a grammar that consists of terminals matches nothing."""
    return _allows_nothing(LLMatcher(tokens, LLMatcher.grammar_from_lark(lark), log_level=0))


def _allows_nothing(matcher: LLMatcher) -> bool:
    matcher.compute_bitmask()
    return NOTHING in matcher.get_error()


def _text_of(tokens: LLTokenizer, after: Sequence[int]) -> str:
    """The text of these tokens; empty if they have none."""
    if any(tokens.is_special_token(token) for token in after):
        return ""
    try:
        return bytes(tokens.decode_bytes(list(after))).decode()
    except UnicodeDecodeError:
        return ""


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise BadRequest(f"constraint: {_TOO_DEEP}") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"constraint: the schema is not valid JSON: {error}") from None


def _schema(schema: Any) -> dict[str, Any]:
    try:
        bound_patterns(schema)
        enforced = _to_the_letter(schema)
        check_satisfiable(enforced)
        return enforced
    except RecursionError:
        raise BadRequest(f"constraint: {_TOO_DEEP}") from None
    except ValueError as error:
        raise BadRequest(f"constraint: {error}") from None


def _with_schemas(lark: str) -> str:
    """A grammar whose `%json` schemas are treated as schemas of a request."""
    pieces: list[str] = []
    at = count = 0
    while lexeme := _LARK_LEXEME.search(lark, at):
        pieces.append(lark[at : lexeme.end()])
        at = lexeme.end()
        if lexeme[0].startswith("%json"):
            count += 1
            if count > _SCHEMAS_MAX:
                raise BadRequest(f"constraint: the lark is too complex: more than {_SCHEMAS_MAX} schemas")
            try:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
                pieces.append(json.dumps(_schema(schema)))
            except RecursionError:
                raise BadRequest(f"constraint: {_TOO_DEEP}") from None
            except json.JSONDecodeError:
                continue  # llguidance says where.
    return "".join([*pieces, lark[at:]])


def _to_the_letter(schema: Any) -> dict[str, Any]:
    """An equivalent schema that llguidance enforces, with a bound on JSON's white space."""
    if not isinstance(schema, dict | bool):
        raise BadRequest("constraint: a JSON schema is an object, true or false")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    schema = without_inexact(schema, lenient=bool(options.get("lenient")))
    if not options.get("lenient"):
        schema = enforceable(schema)
    if not _SPACE_OPTIONS & options.keys():
        options = {**options, **_JSON_OPTIONS}
    return {**schema, "x-guidance": options}


def _reason(kind: Kind, error: str) -> str:
    line = reason_of(error)
    if "Unimplemented keys" in line:
        keys = line.partition("[")[2].partition("]")[0]
        return f"the schema has keywords that cannot be enforced: {keys}"
    if "are not disjoint" in line:
        return (
            'the schema has keywords that cannot be enforced: "allOf" of objects that each allow further members '
            '(say "additionalProperties": false in one), or patternProperties of which two match one name'
        )
    if "recursion limit" in line:
        # llguidance's reader of JSON ends at 128 levels, Python at several hundred.
        return _TOO_DEEP
    if "Too many items" in line or "too many" in line or "fuel" in line:
        return f"the {kind} is too complex: {line}"
    return f"the {kind} cannot be compiled: {line}"
