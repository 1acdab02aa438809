"""Seeded walks through a grammar: what a model could say under it, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from zmqengine.engine.grammar.grammar import Grammar, Kind, compile_grammar, vocabulary
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.grammar.matcher import RowMatcher
from zmqengine.pico import model_path

STEPS_MAX = 300
ENDING = 0.5
HINTING = 0.2
"""How often a walk ends where it may."""


class GrammarWalker:
    """Walks over a vocabulary. Every other one keeps to bytes that JSON is built of, or it would talk in texts.

    `hints` are tokens that a walk by chance would hardly find in a row: it tries them now and then.
    """

    def __init__(
        self, tokenizer: bytes, size: int, eos_token_ids: Sequence[int], hints: Sequence[Sequence[int]] = ()
    ) -> None:
        self._eos = list(eos_token_ids)
        self._size = size
        self._tokens: LLTokenizer = vocabulary(tokenizer, vocab_size=self._size, eos_token_ids=self._eos)
        self._filler = MaskFiller(self._size, self._eos)
        building = set(b'{}[]",:-0123456789.eEtruefalsn \\ab')
        self._closing = np.array(
            [self._tokens.decode_bytes([id_])[:1] in (b'"', b"]", b"}") for id_ in range(self._size)]
        )
        self._plain = np.array(
            [set(self._tokens.decode_bytes([id_])) <= building for id_ in range(self._size)]
        )

        self._hints = [list(hint) for hint in hints]

    @classmethod
    def of_pico(cls) -> GrammarWalker:
        """Over pico's vocabulary."""
        tokenizer = (model_path() / "tokenizer.json").read_bytes()
        config = json.loads((model_path() / "config.json").read_text())
        eos = config["eos_token_id"]
        return cls(tokenizer, int(config["vocab_size"]), [eos] if isinstance(eos, int) else eos)

    def compile(self, schema: object) -> Grammar:
        """Raises `BadRequest` for what is refused."""
        return self.compile_text("json_schema", json.dumps(schema))

    def left_out(self, schema: object) -> list[str]:
        """What of a schema llguidance says that it does not enforce."""
        text = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, self._tokens)
        named = [message.partition(":")[2].partition("]")[0] for message in messages if not failed]
        return [word.strip(' "') for words in named for word in words.strip(" [").split(",")]

    def compile_text(self, kind: Kind, text: str) -> Grammar:
        """A constraint of any kind."""
        return compile_grammar(self._tokens, kind, text)

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether this text is a whole output."""
        return self.allows_tokens(grammar, self._tokens.tokenize_str(text))

    def allows_tokens(self, grammar: Grammar, tokens: Sequence[int]) -> bool:
        """Whether these tokens are a whole output."""
        parser = grammar.start([]).parser
        tokens = list(tokens)
        taken = parser.try_consume_tokens(tokens)
        return taken == len(tokens) and (parser.is_accepting() or parser.is_stopped())

    def walk(self, grammar: Grammar, seeds: Sequence[int]) -> list[bytes]:
        """The outputs that ended by themselves; the others are left out."""
        return [self._tokens.decode_bytes(tokens) for tokens in self.walk_tokens(grammar, seeds)]

    def walk_tokens(self, grammar: Grammar, seeds: Sequence[int]) -> list[list[int]]:
        """The same as tokens."""
        walks = {seed: (grammar.start([]), np.random.default_rng(seed), list[int]()) for seed in seeds}
        ended: list[list[int]] = []
        for _ in range(STEPS_MAX):
            if not walks:
                break
            matchers = [matcher for matcher, _, _ in walks.values()]
            masks = self._filler.fill_windows(matchers, [()] * len(matchers), 1)
            bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._size, bitorder="little").astype(
                bool
            )
            for row, (seed, (matcher, chance, said)) in enumerate(list(walks.items())):
                hinted = self._hinted(matcher, chance)
                if hinted:
                    said.extend(hinted)
                    if matcher.is_complete:
                        ended.append(said)
                        del walks[seed]
                    continue
                token = self._choose(bits[row], chance, plain=seed % 2 == 0)
                if token is None or matcher.parser.is_error():
                    del walks[seed]
                    continue
                if token not in self._eos:
                    matcher.consume(token)
                    said.append(token)
                if token in self._eos or matcher.is_complete:
                    ended.append(said)
                    del walks[seed]
        return ended

    def _hinted(self, matcher: RowMatcher, chance: np.random.Generator) -> list[int]:
        """One of the hints, if it may come now and chance wants it."""
        for tokens in self._hints:
            if chance.random() < HINTING and matcher.parser.validate_tokens(tokens) == len(tokens):
                for token in tokens:
                    matcher.consume(token)
                return tokens
        return []

    def _choose(self, allowed: np.ndarray, chance: np.random.Generator, *, plain: bool) -> int | None:
        ends = [id_ for id_ in self._eos if allowed[id_]]
        if ends and chance.random() < ENDING:
            return ends[0]
        closing = allowed & self._closing
        if closing.any() and chance.random() < ENDING / 2:
            allowed = closing
        few = allowed & self._plain
        # Not always, or texts would never get the letters that a pattern wants.
        if few.any() and (plain or chance.random() < 0.5):
            allowed = few
        ids = np.flatnonzero(allowed)
        return int(chance.choice(ids)) if ids.size else None
