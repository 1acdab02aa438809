"""A tokenizer for models of random weights: byte-level BPE learnt from invented words."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(vocabulary: int, seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer in which many invented words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_invented_text(vocabulary, seed), trainer)
    return tokenizer


def widened(tokenizer: Tokenizer, vocabulary: int) -> Tokenizer:
    """A copy with further tokens, each the concatenation of two existing ones."""
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    known: dict[str, int] = model["vocab"]
    words = [word for word in known if word.isascii() and word.isalpha()]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    for first, second in itertools.product(words, reversed(words)):
        if len(known) >= vocabulary:
            break
        if first + second not in known:
            known[first + second] = len(known)
            merges.append([first, second])
    model["merges"] = merges
    return Tokenizer.from_str(json.dumps(described))


def _invented_text(vocabulary: int, seed: int) -> Iterator[str]:
    """Lines of words made of syllables, with a skewed distribution: enough to train every merge."""
    choose = random.Random(seed)
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = sorted({"".join(choose.choices(syllables, k=choose.randint(1, 4))) for _ in range(vocabulary)})
    choose.shuffle(words)
    weights = [1 / (rank + 20) for rank in range(len(words))]
    for _ in range(4 * vocabulary):
        yield " " + " ".join(choose.choices(words, weights, k=12))
