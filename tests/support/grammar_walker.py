"""Seeded walks through a grammar: what a model could say under it, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer

from zmqengine.engine.constraints.grammar import Grammar, compile_grammar, vocabulary
from zmqengine.engine.constraints.mask import MaskFiller
from zmqengine.pico import model_path

STEPS_MAX = 300
ENDING = 0.5
"""How often a walk ends where it may."""


class GrammarWalker:
    """Walks over pico's vocabulary. Every other one keeps to bytes that JSON is built of, or it would talk in texts."""

    def __init__(self) -> None:
        tokenizer = (model_path() / "tokenizer.json").read_bytes()
        config = json.loads((model_path() / "config.json").read_text())
        eos = config["eos_token_id"]
        self._eos = [eos] if isinstance(eos, int) else list(eos)
        self._size = int(config["vocab_size"])
        self._tokens: LLTokenizer = vocabulary(tokenizer, vocab_size=self._size, eos_token_ids=self._eos)
        self._filler = MaskFiller(self._size, self._eos)
        building = set(b'{}[]",:-0123456789.eEtruefalsn \\ab')
        self._closing = np.array(
            [self._tokens.decode_bytes([id_])[:1] in (b'"', b"]", b"}") for id_ in range(self._size)]
        )
        self._plain = np.array(
            [set(self._tokens.decode_bytes([id_])) <= building for id_ in range(self._size)]
        )

    def compile(self, schema: object) -> Grammar:
        """Raises `BadRequest` for what is refused."""
        return compile_grammar(self._tokens, "json_schema", json.dumps(schema))

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether this text is a whole output."""
        parser = grammar.start([]).parser
        tokens = self._tokens.tokenize_str(text)
        taken = parser.try_consume_tokens(tokens)
        return taken == len(tokens) and (parser.is_accepting() or parser.is_stopped())

    def walk(self, grammar: Grammar, seeds: Sequence[int]) -> list[bytes]:
        """The outputs that ended by themselves; the others are left out."""
        walks = {seed: (grammar.start([]), np.random.default_rng(seed), list[int]()) for seed in seeds}
        ended = []
        for _ in range(STEPS_MAX):
            if not walks:
                break
            masks = self._filler.fill([matcher for matcher, _, _ in walks.values()])
            bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._size, bitorder="little").astype(
                bool
            )
            for row, (seed, (matcher, chance, said)) in enumerate(list(walks.items())):
                token = self._choose(bits[row], chance, plain=seed % 2 == 0)
                if token is None or matcher.parser.is_error():
                    del walks[seed]
                    continue
                if token not in self._eos:
                    matcher.consume(token)
                    said.append(token)
                if token in self._eos or matcher.is_complete:
                    ended.append(self._tokens.decode_bytes(said))
                    del walks[seed]
        return ended

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
