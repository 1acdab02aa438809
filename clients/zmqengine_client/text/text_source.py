"""Texts of an embed or a rerank, tokenized a slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zmqengine.errors import BadRequest
from zmqengine_client.core.embedding import TextIds, check_list
from zmqengine_client.core.options import token_ids
from zmqengine_client.text.long_texts import encode_pairs, encode_texts
from zmqengine_client.text.tokenizer import Tokenizer

SHORT_CHARACTERS = 1000
"""Characters that are tokenized in 0.1 to 0.3 ms: a thread takes as long to be woken."""
KNOWN_CHARACTERS = 8000
"""Characters of known words that are tokenized in 0.2 to 0.3 ms."""

Text = str | Sequence[int]
Encode = Callable[[Tokenizer, int, int, int], list[TextIds]]


class TextSource(NamedTuple):
    """Texts to tokenize.

    `encode(tokenizer, start, stop, tokens_max)`: token ids of the texts from `start` to `stop`, for a model that reads
    `tokens_max` tokens. `characters`: characters, or tokens, of all texts.
    """

    encode: Encode
    characters: int


def source_of(texts: Sequence[Text], prompt: str | None = None) -> TextSource:
    """The source that tokenizes texts after the model's prompt of this name; token ids are unchanged.

    None is the model's default prompt, if it has one, and an empty name is no prompt.
    """
    check_list("texts", texts)

    def encode(tokenizer: Tokenizer, start: int, stop: int, tokens_max: int) -> list[TextIds]:
        part = texts[start:stop]
        name = tokenizer.facts.get("default_prompt") if prompt is None else prompt
        before = prompt_of(tokenizer, name) if isinstance(name, str) and name else ""
        plain = [before + text for text in part if isinstance(text, str)]
        encoded = encode_texts(tokenizer, plain, tokens_max)
        return [
            next(encoded) if isinstance(text, str) else TextIds(token_ids(text, f"text {index}"))
            for index, text in enumerate(part, start)
        ]

    return TextSource(encode, sum(map(_characters, texts)))


def prompt_of(tokenizer: Tokenizer, name: str) -> str:
    """The model's prompt for a kind of texts, such as `query`. Raises `BadRequest` for an unknown name."""
    prompts = {
        fact.removeprefix("prompt_"): text
        for fact, text in tokenizer.facts.items()
        if fact.startswith("prompt_") and isinstance(text, str)
    }
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise BadRequest(f"prompt: the model has no prompt {name!r}; it has {known}")
    return prompts[name]


def pair_source(query: str, documents: Sequence[str]) -> TextSource:
    """The source that tokenizes the query with each document."""

    def encode(tokenizer: Tokenizer, start: int, stop: int, tokens_max: int) -> list[TextIds]:
        return list(encode_pairs(tokenizer, query, documents[start:stop], tokens_max))

    return TextSource(encode, _characters(query) * len(documents) + sum(map(_characters, documents)))


def _characters(text: object) -> int:
    # An object of another type may be long, or an error.
    return len(text) if isinstance(text, str | list) else SHORT_CHARACTERS + 1
