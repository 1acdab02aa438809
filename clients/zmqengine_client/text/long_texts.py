"""Texts of any length to token ids in bounded memory: a tokenizer has half a kilobyte for each token of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zmqengine.errors import ContextExceeded
from zmqengine_client.core.embedding import TextIds
from zmqengine_client.text.tokenizer import Tokenizer

CHARACTERS = 64 * 1024
"""Characters of a call: those of several texts, or the next ones of a longer text."""
SEAM_TOKENS = 8
"""Upper bound of the extra tokens that come of cutting a text in two."""


def count_up_to(tokenizer: Tokenizer, text: str, tokens_max: int) -> tuple[int, int]:
    """A lower bound of the text's tokens, and the characters that were counted: it stops soon after `tokens_max`."""
    count = end = 0
    while end < len(text) and count <= tokens_max:
        (tokens,) = tokenizer.encode_all([text[end : end + CHARACTERS]], add_special_tokens=False)
        count += max(0, len(tokens) - SEAM_TOKENS)
        end += CHARACTERS
    return count, min(end, len(text))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], tokens_max: int) -> Iterator[TextIds]:
    """The token ids of each text; of one that is far longer than `tokens_max`, those of its `beginning`."""
    for part in _parts(texts, 0):
        begun = [beginning(tokenizer, text, tokens_max) for text in part]
        for text, read, ids in zip(part, begun, tokenizer.encode_all(begun), strict=True):
            yield TextIds(ids, is_whole=len(read) == len(text))


def encode_pairs(
    tokenizer: Tokenizer, first: str, others: Sequence[str], tokens_max: int
) -> Iterator[TextIds]:
    """The token ids of `first` with each of the others, as those of `encode_texts`.

    Raises `ContextExceeded` where `first` alone is too long: it would be tokenized once for each of the others.
    """
    (alone,) = encode_texts(tokenizer, [first], tokens_max)
    if len(alone.ids) > tokens_max:
        over = "" if alone.is_whole else "over "
        raise ContextExceeded(
            f"the query has {over}{len(alone.ids)} tokens, and leaves no room for a document among the "
            f"{tokens_max} that the model reads: shorten it"
        )
    for part in _parts(others, len(first)):
        begun = [beginning(tokenizer, text, tokens_max) for text in part]
        pairs = tokenizer.encode_pairs(first, begun)
        for text, read, (ids, second) in zip(part, begun, pairs, strict=True):
            yield TextIds(ids, second, is_whole=len(read) == len(text))


def beginning(tokenizer: Tokenizer, text: str, tokens_max: int) -> str:
    """The text, or of one that is far longer than `tokens_max` a beginning that is too long as well."""
    return text if len(text) <= CHARACTERS else text[: count_up_to(tokenizer, text, tokens_max)[1]]


def _parts(texts: Sequence[str], beside: int) -> Iterator[list[str]]:
    """The texts in lists of at most `CHARACTERS`, with `beside` more for each text, or of one text."""
    part: list[str] = []
    characters = 0
    for text in texts:
        characters += beside + len(text)
        if part and characters > CHARACTERS:
            yield part
            part, characters = [], beside + len(text)
        part.append(text)
    if part:
        yield part
