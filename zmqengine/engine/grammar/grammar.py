"""From what a request asks for to a grammar that rows can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from zmqengine.engine.grammar.matcher import RowMatcher
from zmqengine.engine.grammar.schema import enforceable
from zmqengine.errors import BadRequest

Kind = Literal["json_schema", "json", "regex", "lark", "choice"]
# One space, or a new line and its indentation: a model that may write any white space writes nothing else when it does
# not know what to say.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,16}|\n\t{0,8})?"}
_SPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}
_JSON_OBJECT = {"type": "object"}
# What may hide a `%json` that is none: texts, expressions and comments.
_LARK_LEXEME = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|#)[^\n]*|%json\s*')


class Grammar:
    """A constraint, compiled. Any number of rows may follow it at the same time.

    It begins at once, or when the output has had the tokens of `after` in a row: see `compile_grammar`.
    """

    def __init__(self, template: LLMatcher, after: Sequence[int] = ()) -> None:
        self._template = template
        self._after = tuple(after)

    def start(self, emitted: Sequence[int]) -> RowMatcher:
        """A matcher for a row that has made `emitted` so far. Raises `ConstraintBroken` if it cannot follow that."""
        return RowMatcher(self._template.deep_copy(), self._after, emitted)


def vocabulary(tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The table of a model's tokens; about a second for 150,000 of them.

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
    """The grammar of a constraint, in bounded time; the interpreter's lock is not held meanwhile.

    It begins after the text of `after`, whatever tokens that is written with. Special tokens have no text: with one
    among them it begins after these very tokens in a row. Until then no end token can come.

    Raises `BadRequest` that says what is wrong with it, or what of it cannot be enforced.
    """
    grammar, marker = _grammar_text(kind, text, choices), _text_of(tokens, after)
    if marker:
        grammar = _beginning_after(marker, kind, grammar)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise BadRequest(f"constraint: {_reason(kind, matcher.get_error())}")
    return Grammar(matcher, () if marker else after)


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
            return str(LLMatcher.grammar_from_lark(_with_schemas(text)))
        case "choice":
            if not choices:
                raise BadRequest("constraint: choices is empty")
            alternatives = " | ".join(json.dumps(choice) for choice in choices)
            return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _text_of(tokens: LLTokenizer, after: Sequence[int]) -> str:
    """The text of these tokens; empty if they have none."""
    if any(tokens.is_special_token(token) for token in after):
        return ""
    try:
        return bytes(tokens.decode_bytes(list(after))).decode()
    except UnicodeDecodeError:
        return ""


def _beginning_after(marker: str, kind: Kind, grammar: str) -> str:
    """A grammar that begins where free text has come to `marker`; what a token has behind it must fit the grammar."""
    free = f"start: before @answer\nbefore[suffix={json.dumps(marker, ensure_ascii=False)}]: /(?s:.*)/"
    answer = {"lark_grammar": grammar} if kind in ("lark", "choice") else json.loads(grammar)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": free}, {**answer, "name": "answer"}]})


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"constraint: the schema is not valid JSON: {error}") from None


def _from_schema(schema: Any) -> str:
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(_to_the_letter(schema))))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"constraint: {error}") from None


def _with_schemas(lark: str) -> str:
    """A grammar whose `%json` schemas are taken as those that come alone."""
    pieces: list[str] = []
    at = 0
    while found := _LARK_LEXEME.search(lark, at):
        pieces.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%json"):
            try:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
                pieces.append(json.dumps(_to_the_letter(schema)))
            except RecursionError:
                raise BadRequest("constraint: the schema is nested too deep") from None
            except json.JSONDecodeError:
                continue  # llguidance says where.
    return "".join([*pieces, lark[at:]])


def _to_the_letter(schema: Any) -> dict[str, Any]:
    """The schema in words that llguidance enforces, with the white space that JSON may have here."""
    if not isinstance(schema, dict | bool):
        raise BadRequest("constraint: a JSON schema is an object, true or false")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    if not options.get("lenient"):
        schema = enforceable(schema)
    if not _SPACE_OPTIONS & options.keys():
        options = {**options, **_JSON_OPTIONS}
    return {**schema, "x-guidance": options}


def _reason(kind: Kind, error: str) -> str:
    line = " ".join(error.split())[:500]
    if "Unimplemented keys" in line:
        keys = line.partition("[")[2].partition("]")[0]
        return f"the schema has keywords that cannot be enforced: {keys}"
    if "are not disjoint" in line:
        return (
            'the schema has keywords that cannot be enforced: "allOf" of objects that each allow further members '
            '(say "additionalProperties": false in one), or patternProperties of which two match one name'
        )
    return f"the {kind} cannot be compiled: {line}"
