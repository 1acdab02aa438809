"""Prompts are tokenised in parts, with the same outcome."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from zmqengine_client.text.segment_cache import PART_CHARS_MIN, SegmentCache

SPECIAL = ["<|a|>", "<|b|>", "<|a|>x"]
LONG = "some words that repeat and repeat, " * 20


def trained(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([LONG, "a b c <|a|> d e\n\n f"], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


class Counted:
    """A tokenizer whose work is counted in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chars = 0

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.chars += sum(map(len, texts))
        return [
            encoding.ids
            for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]


def byte_level() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def encode() -> Counted:
    return Counted(byte_level())


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL, " ", "\n", "a", "b c", "<|", "|>", "\u00e9", LONG]), max_size=12
    )
)
def test_cut_or_whole_the_ids_are_the_same(parts: list[str]) -> None:
    """Whatever stands where, twice."""
    encode = Counted(_SHARED)
    cache = SegmentCache(_SHARED, encode)
    assert cache.usable
    text = "".join(parts)
    assert cache.encode(text) == cache.encode(text) == encode([text])[0]


_SHARED = byte_level()


def test_only_what_is_new_is_tokenised(encode: Counted) -> None:
    """Of a conversation, the last turn."""
    cache = SegmentCache(encode.tokenizer, encode)
    head = f"<|a|>{LONG}<|b|>{LONG * 2}<|b|>"
    cache.encode(head)
    before = encode.chars
    cache.encode(head + "the new turn")
    assert encode.chars - before == len("the new turn")


def test_what_is_kept_is_bounded(encode: Counted) -> None:
    """By characters; the oldest goes first."""
    cache = SegmentCache(encode.tokenizer, encode, chars_max=3 * PART_CHARS_MIN)
    texts = [str(number) * PART_CHARS_MIN for number in range(5)]
    for text in texts:
        cache.encode(text)
    before = encode.chars
    cache.encode(texts[-1])
    assert encode.chars == before
    cache.encode(texts[0])
    assert encode.chars > before


@pytest.mark.parametrize(
    "tokenizer",
    [
        trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
        byte_level(),
    ],
    ids=["depends on the start of the text", "does not"],
)
def test_a_tokenizer_that_looks_at_the_start_of_a_text_is_not_cut(tokenizer: Tokenizer) -> None:
    """The test at the start decides, and either way the ids are right."""
    encode = Counted(tokenizer)
    cache = SegmentCache(tokenizer, encode)
    text = f"one<|a|>two {LONG}<|b|> three"
    whole = encode([text])[0]
    assert cache.encode(text) == whole
    by_parts = [id_ for part in ("one", f"two {LONG}", " three") for id_ in encode([part])[0]]
    special = {tokenizer.token_to_id(token) for token in SPECIAL}
    assert cache.usable is (by_parts == [id_ for id_ in whole if id_ not in special])


def test_tokens_that_take_white_space_with_them_are_no_place_to_cut() -> None:
    """Their neighbours are not tokenised alone."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|r|>", special=True, rstrip=True)])
    encode = Counted(tokenizer)
    text = f"one <|r|>   two {LONG}<|r|>\n\n<|a|> three"
    assert SegmentCache(tokenizer, encode).encode(text) == encode([text])[0]
