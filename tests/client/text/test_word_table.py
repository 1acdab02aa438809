"""Token ids of texts by the words that are known already."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from zmqengine_client.text import word_table
from zmqengine_client.text.word_table import LEARNED_MAX, WORD_CHARACTERS_MAX, WordTable

WORDS = [
    "a", "the", "cat", "sat", "un", "##s", "##able", "don", "'", "t", ",", ".", "[", "]", "-", "Cat", "3", "##7",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class Library:
    """A tokenizer of BERT, and the texts that it was asked for."""

    def __init__(self, *, lowercase: bool = True, added: Sequence[AddedToken | str] = ()) -> None:
        vocabulary = {word: id_ for id_, word in enumerate([*SPECIAL, *WORDS])}
        self.tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        self.tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        self.tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        self.tokenizer.add_special_tokens(SPECIAL)
        self.tokenizer.add_tokens(list(added))
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        self.asked += texts
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encoded]

    def table(self) -> WordTable | None:
        found = WordTable.of(self.tokenizer, self)
        self.asked.clear()
        return found


def drawn(draw: random.Random) -> str:
    """A text of words, of printable characters, or of any."""
    characters = draw.choice(
        (
            [*WORDS, " ", " ", "  ", "\t", "\n"],
            [chr(code) for code in range(32, 127)],
            [chr(code) for code in range(256)] + ["\u201c", "\u4e2d", "\u00ad", "\u2028", "\u0130"],
            [*SPECIAL, "[mask]", "[CLS", " ", "a", "new", "New", "[X]"],
        )
    )
    return "".join(draw.choice(characters) for _ in range(draw.choice((0, 1, 3, 8, 30, 150))))


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_text_has_the_ids_of_the_library(lowercase: bool) -> None:
    """Whatever is in it: control characters, other scripts, special tokens, words that are too long."""
    library = Library(lowercase=lowercase, added=["new", AddedToken("[X]", lstrip=True, normalized=False)])
    table = library.table()
    assert table is not None
    draw = random.Random(5)
    for _ in range(300):
        texts = [drawn(draw) for _ in range(8)]
        assert table.encode(texts) == library(texts, True)


def test_the_library_is_asked_for_a_word_once() -> None:
    """And for a text with characters that only it knows each time, which is no known text then."""
    library = Library()
    table = library.table()
    assert table is not None
    assert table.encode(["The cat, the CAT.", "cats"]) == [[2, 6, 7, 15, 6, 7, 16, 3], [2, 7, 10, 3]]
    assert sorted(library.asked) == ["cat,", "cat.", "cats", "the"]
    library.asked.clear()
    assert table.encode(["Cats the cat."]) == [[2, 7, 10, 6, 7, 16, 3]]
    assert library.asked == []
    assert table.knew_all
    for _ in range(2):
        table.encode(["cats", "caf\u00e9", "a [MASK]"])
        assert library.asked == ["caf\u00e9", "a [MASK]"]
        assert not table.knew_all
        library.asked.clear()


def test_a_call_learns_few_words_and_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of numbers that never come again cost little more than without the table."""
    library = Library()
    table = library.table()
    assert table is not None
    texts = [" ".join(f"x{text}y{word}" for word in range(10)) for text in range(2 * LEARNED_MAX)]
    assert table.encode(texts) == library(texts, True)
    assert len([asked for asked in library.asked if " " not in asked]) == LEARNED_MAX
    monkeypatch.setattr(word_table, "WORDS_MAX", 100)
    for text in texts:
        assert table.encode([text]) == library([text], True)
        assert len(table._ids) <= 100
    before = len(table._ids)
    for _ in range(2):
        table.encode(["x" * (WORD_CHARACTERS_MAX + 1)])
        assert not table.knew_all
    assert len(table._ids) == before


def test_tokenizers_whose_words_depend_on_each_other_have_no_table() -> None:
    """Nor those with an added token that the normalizer makes another one."""
    library = Library()
    library.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert library.table() is None
    library = Library()
    library.tokenizer.normalizer = normalizers.Lowercase()
    assert library.table() is None
    assert Library(added=["caf\u00e9"]).table() is None
    assert Library(added=["two words"]).table() is None
    # This tokenizer cannot read words outside of its vocabulary.
    library = Library()
    library.tokenizer.model = models.WordPiece({"a": 0}, unk_token="[UNK]")
    assert library.table() is None
    library = Library()
    library.tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    assert library.table() is None
