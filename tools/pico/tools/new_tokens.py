"""A trained model goes on with another tokenizer."""

from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from tools.pico.markers import SPECIAL_TOKENS


def new_embeddings(old: mx.array, old_tokenizer: Tokenizer, tokenizer: Tokenizer) -> mx.array:
    """Embeddings for the tokens of `tokenizer`, shape (tokens, width), made of `old` ones.

    A token that both have keeps its own; any other gets the mean of what the old tokenizer makes of its text.
    """
    known: dict[str, int] = old_tokenizer.get_vocab()
    names: dict[int, str] = {index: name for name, index in tokenizer.get_vocab().items()}
    rows = [_row(old, name, known, old_tokenizer, tokenizer, index) for index, name in sorted(names.items())]
    return mx.stack(rows)


def _row(
    old: mx.array,
    name: str,
    known: dict[str, int],
    old_tokenizer: Tokenizer,
    tokenizer: Tokenizer,
    index: int,
) -> mx.array:
    if name in known:
        return old[known[name]]
    text: Any = name if name in SPECIAL_TOKENS else tokenizer.decode([index], skip_special_tokens=False)
    return old[mx.array(old_tokenizer.encode(text, add_special_tokens=False).ids)].mean(axis=0)
