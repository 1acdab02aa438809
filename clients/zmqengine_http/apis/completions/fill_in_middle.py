"""Fill in the middle: a prompt and a suffix in the form that code models were trained on.

The markers are found in the vocabulary by name. Sources: the papers and model cards of StarCoder (and
Granite), Qwen2.5-Coder and CodeGemma, DeepSeek-Coder, Code Llama, Codestral.
"""

from __future__ import annotations

from typing import NamedTuple

from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.prompt.prompts import encode_text
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model


class _Marks(NamedTuple):
    """The tokens before prefix, suffix and middle; `suffix_first` if the suffix comes before the prefix."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


_STYLES = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _Marks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    _Marks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    _Marks("<PRE>", "<SUF>", "<MID>"),
    _Marks("[PREFIX]", "[SUFFIX]", suffix_first=True),
)
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "\u2581<EOT>",
    "<EOT>",
    "<file_sep>",
)
_GLUE = "\u263a"
"""SentencePiece prepends a space to a text, which a suffix must not have: encode it after this character,
whose tokens are then cut off."""


def middle_prompt(model: Model, prefix: str | list[int], suffix: str) -> list[int]:
    """The prompt whose continuation is the text between `prefix` and `suffix`. Raises a 400 without such
    markers."""
    tokenizer = model.tokenizer
    marks = next((style for style in _STYLES if _is_known(tokenizer, style)), None)
    if marks is None:
        raise bad_field(
            "suffix",
            "this model has no tokens for filling in the middle; use a model for code, or leave the suffix out",
            code="unsupported_parameter",
        )
    before = encode_text(model, prefix, add_special_tokens=False) if isinstance(prefix, str) else prefix
    glued = encode_text(model, _GLUE + suffix, add_special_tokens=False)
    after = glued[len(tokenizer.encode(_GLUE, add_special_tokens=False)) :]
    first = [*_ids(tokenizer, marks.prefix), *before]
    second = [*_ids(tokenizer, marks.suffix), *after]
    parts = [*second, *first] if marks.suffix_first else [*first, *second]
    return [*tokenizer.encode(""), *parts, *_ids(tokenizer, marks.middle)]


def middle_ends(model: Model) -> list[int]:
    """Tokens other than the model's end tokens that end the middle: after them another file begins."""
    names = {*_ENDS, *(mark for style in _STYLES for mark in style[:3] if mark)}
    ids = [model.tokenizer.token_id(name) for name in sorted(names)]
    return [id_ for id_ in ids if id_ is not None and id_ < model.card.vocab_size]


def _is_known(tokenizer: Tokenizer, style: _Marks) -> bool:
    return all(tokenizer.token_id(mark) is not None for mark in style[:3] if mark)


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    id_ = tokenizer.token_id(mark)
    return [] if id_ is None else [id_]
