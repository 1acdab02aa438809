"""A table of token ids by word, for tokenizers of BERT: a text of known words costs a look-up for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, islice

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

CHARACTERS_MAX = 16_384
"""Characters of a call, which take half a millisecond in which no other thread of the interpreter runs. The library
lets them run, and tokenizes more on all cores."""
WORDS_MAX = 30_522
"""Maximum words in the table: the size of BERT's vocabulary."""
LEARNED_MAX = 64
"""Words that a call adds: to tokenize one alone takes as long as a text of ten characters."""
WORD_CHARACTERS_MAX = 32
"""Characters of a word that is kept: a longer one seldom comes again."""
_PLAIN = re.compile(r"[\t\n\r -~]*")
_PROBES = ("", " ", "a", "A b", "it's\tb-\r\nc, d!", "x" * 200, bytes(range(32, 127)).decode())

EncodeBatch = Callable[[Sequence[str], bool], list[list[int]]]
"""Token ids of each text by the library, with special tokens or without."""


class WordTable:
    """`encode` gives the same ids as the library, with special tokens. Safe to use from several threads.

    A tokenizer of BERT first cuts a text at white space, and the tokens of a word between it, with its punctuation,
    depend on nothing else. The table serves texts of printable ASCII: white space and words of other scripts are left
    to the library.
    """

    def __init__(self, tokenizer: Tokenizer, encode_batch: EncodeBatch) -> None:
        self._encode_batch = encode_batch
        self._lowers = bool(tokenizer.normalizer.lowercase)
        # The library looks for them before it cuts a text.
        self._added = [token.content.lower() for token in tokenizer.get_added_tokens_decoder().values()]
        self._ids: dict[str, tuple[int, ...]] = {}
        self.knew_all = False
        """Whether the last call needed the library for no more than `LEARNED_MAX` words."""
        (alone,), (within,) = encode_batch(["a"], False), encode_batch(["a"], True)
        start = within.index(alone[0]) if alone and alone[0] in within else 0
        self._head, self._tail = within[:start], within[start + len(alone) :]

    @classmethod
    def of(cls, tokenizer: Tokenizer, encode_batch: EncodeBatch) -> WordTable | None:
        """The table of a tokenizer; None for one that is not BERT's."""
        if not (
            isinstance(tokenizer.normalizer, BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
            and isinstance(tokenizer.model, WordPiece)
        ):
            return None
        # Others are not within one word, or are looked for as the normalizer leaves them.
        if not all(
            _PLAIN.fullmatch(token.content) and token.content.split() == [token.content]
            for token in tokenizer.get_added_tokens_decoder().values()
        ):
            return None
        try:
            table = cls(tokenizer, encode_batch)
            return table if table.encode(_PROBES) == encode_batch(_PROBES, True) else None
        except Exception:  # noqa: BLE001 - the library raises plain Exception
            # It raises for a text that it cannot read.
            return None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        words = [self._words(text) for text in texts]
        made = [self._joined(of_text) for of_text in words]
        if None in made:
            unknown = set(chain.from_iterable(of_text for of_text in words if of_text)) - self._ids.keys()
            self._learn(list(islice(filter(self._may_keep, unknown), LEARNED_MAX)))
            made = [self._joined(of_text) for of_text in words]
        missing = [index for index, ids in enumerate(made) if ids is None]
        self.knew_all = not missing
        if missing:
            for index, ids in zip(
                missing, self._encode_batch([texts[index] for index in missing], True), strict=True
            ):
                made[index] = ids
        return [ids for ids in made if ids is not None]

    def _words(self, text: str) -> list[str] | None:
        """The words of a text; None for a text that the library has to tokenize."""
        if not _PLAIN.fullmatch(text):
            return None
        return (text.lower() if self._lowers else text).split()

    def _joined(self, words: list[str] | None) -> list[int] | None:
        """The token ids of a text; None if a word is unknown."""
        if words is None:
            return None
        try:
            return [*self._head, *chain.from_iterable(map(self._ids.__getitem__, words)), *self._tail]
        except KeyError:
            return None

    def _may_keep(self, word: str) -> bool:
        lowered = word.lower()
        return len(word) <= WORD_CHARACTERS_MAX and not any(token in lowered for token in self._added)

    def _learn(self, words: list[str]) -> None:
        if len(self._ids) + len(words) > WORDS_MAX:
            self._ids.clear()
        # One after the other: the library wakes other threads for a batch, which takes longer than a few words.
        for word in words:
            self._ids[word] = tuple(self._encode_batch([word], False)[0])
