"""Prompts of an exact number of tokens, made of words that are one token each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from zmqengine.bench.targets.records import RequestSpec

Encode = Callable[[str], list[int]]

# For servers with an unknown tokenizer: words that are one token in most vocabularies.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team
"""
COMMON_WORDS = _COMMON.split()

WORDS_MAX = 2000


class Prompts:
    """Random prompts; the same seed makes the same prompts.

    Without `encode` a word counts as a token, which is close enough for unknown tokenizers: the prompt tokens in a
    report are always those counted by the server.
    """

    def __init__(self, words: Sequence[str], encode: Encode | None, seed: str) -> None:
        self._words = words
        self._encode = encode
        self._random = random.Random(seed)

    def reseeded(self, seed: str) -> Prompts:
        """Prompts of the same words from another seed."""
        return Prompts(self._words, self._encode, seed)

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a piece of output."""
        return len(self._encode(text)) if self._encode else len(text.split())

    def text(self, tokens: int) -> str:
        """Random words of `tokens` tokens in total, special tokens included."""
        words = [self._random.choice(self._words) for _ in range(tokens)]
        if self._encode is None:
            return " ".join(words)
        text = " " + " ".join(words)
        while (over := len(self._encode(text)) - tokens) > 0 and len(words) > over:
            words = words[over:]
            text = " " + " ".join(words)
        return text

    def request(
        self, prompt_tokens: int, max_tokens: int, *, prefix: str = "", stream: bool = True
    ) -> RequestSpec:
        """A request with a prompt of `prompt_tokens` random tokens after `prefix`."""
        return self.request_of(prefix + self.text(prompt_tokens), max_tokens, stream=stream)

    def request_of(
        self,
        text: str,
        max_tokens: int,
        *,
        stream: bool = True,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> RequestSpec:
        ids = self._encode(text) if self._encode else []
        return RequestSpec(
            text=text,
            prompt_ids=ids,
            max_tokens=max_tokens,
            stream=stream,
            temperature=temperature,
            top_p=top_p,
        )


class Vocabulary(NamedTuple):
    """A tokenizer for prompts: text to ids with special tokens, ids to text, and the number of ids."""

    encode: Encode
    decode: Callable[[list[int]], str]
    size: int


def vocabulary_of_file(tokenizer_json: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids)
        return text

    return Vocabulary(encode, decode, tokenizer.get_vocab_size())


def prompts_for(vocabulary: Vocabulary | None, seed: str) -> Prompts:
    """Prompts for servers with this vocabulary; None if it is unknown."""
    if vocabulary is None:
        return Prompts(COMMON_WORDS, None, seed)
    return Prompts(words_of_one_token(vocabulary), vocabulary.encode, seed)


def words_of_one_token(vocabulary: Vocabulary) -> list[str]:
    """Lower-case ASCII words that are one token after a space."""
    words = []
    special = len(vocabulary.encode(""))
    for id_ in range(vocabulary.size):
        word = vocabulary.decode([id_]).strip()
        if not (word.isascii() and word.isalpha() and word.islower() and len(word) > 1):
            continue
        if len(vocabulary.encode(f" {word} {word}")) == special + 2:
            words.append(word)
        if len(words) == WORDS_MAX:
            break
    return words or list(COMMON_WORDS)
