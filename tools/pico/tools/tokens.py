"""The tokenizer of pico-tools: a word is cut alike with and without a space before it.

So what a user writes can be copied into quotes piece by piece.
"""

import json
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.pico.markers import SPECIAL_TOKENS
from tools.pico.template import TOOL_MARKERS

# What byte-level BPE writes for a space.
_SPACE = "\u0120"


def train_tokenizer(texts: Iterable[str], pieces: int, spaced_words: int) -> Tokenizer:
    """A tokenizer of `pieces` tokens that hold no space, and the commonest `spaced_words` of them with one before.

    Every digit is a token, and so is every marker of the chat template.
    """
    known = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.train_from_iterator(known, _trainer(pieces))
    learnt = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = dict(learnt["vocab"])
    merges = [(left, right) for left, right in learnt["merges"]]
    for word in _spaced_words(known, vocabulary, spaced_words):
        vocabulary[_SPACE + word] = len(vocabulary)
        merges.append((_SPACE, word))
    spaced = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    spaced.add_special_tokens(list(SPECIAL_TOKENS))
    spaced.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in TOOL_MARKERS])
    return spaced


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trainer(vocabulary_size: int) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _spaced_words(texts: list[str], vocabulary: dict[str, int], count: int) -> list[str]:
    splitter = _byte_level(models.BPE()).pre_tokenizer
    counted: Counter[str] = Counter()
    for text in texts:
        counted.update(piece for piece, _ in splitter.pre_tokenize_str(text) if piece.startswith(_SPACE))
    words = sorted(counted, key=lambda word: (-counted[word], word))
    return [word[1:] for word in words if word[1:] in vocabulary][:count]
