"""Compares the vocabularies of two models: draft model and target must have the same token ids."""

from __future__ import annotations

import json
from typing import Any

_SHOWN = 3


def difference(tokenizer_json: bytes, other_json: bytes) -> str:
    """Differences between two vocabularies in the format of the `tokenizers` library, for people; empty for none."""
    ours, theirs = _words(tokenizer_json), _words(other_json)
    unlike = [id_ for id_ in sorted(ours.keys() | theirs.keys()) if ours.get(id_) != theirs.get(id_)]
    if not unlike:
        return ""
    shown = ", ".join(
        f"{id_} is {_text(ours.get(id_))} and {_text(theirs.get(id_))}" for id_ in unlike[:_SHOWN]
    )
    return f"{len(unlike):,} of {len(ours.keys() | theirs.keys()):,} tokens differ: {shown}"


def _words(tokenizer_json: bytes) -> dict[int, str]:
    tokenizer: Any = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((word[0], id_) for id_, word in enumerate(vocabulary))
    )
    words = {id_: text for text, id_ in pairs}
    return words | {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}


def _text(word: str | None) -> str:
    return "nothing" if word is None else repr(word)
