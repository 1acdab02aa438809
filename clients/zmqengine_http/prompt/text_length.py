"""Refuses a text that cannot fit the context before all of it is tokenised, which costs a second and more for 1 MB."""

from __future__ import annotations

import math

from zmqengine_http.serving.errors import ContextTooLong
from zmqengine_http.workers.worker import Model

DENSE_BYTES = 8
"""Text of more bytes a token than this is rare: with more for each token of the context, a text is counted first."""
SLICE_CHARS = 64 * 1024
SEAM_TOKENS = 8
"""More tokens than this do not come of cutting a text in two."""


def check_text_fits(param: str, model: Model, text: str) -> None:
    """Raise a 400 for a text that surely has more tokens than the context, at a cost that the context bounds.

    What passes may still be too long: only its tokens tell.
    """
    context = model.card.context_tokens
    if len(text) <= context:
        return
    size = len(text.encode("utf-8", "replace"))
    at_least = math.ceil(size / model.tokenizer.longest_token_bytes)
    if at_least <= context and size > context * DENSE_BYTES:
        at_least = _count_up_to(model, text, context)
    if at_least > context:
        raise ContextTooLong(param, prompt=at_least, wanted=1, context=context)


def _count_up_to(model: Model, text: str, tokens_max: int) -> int:
    """A number of tokens that the text does not have fewer of; counting ends soon after `tokens_max`."""
    count = 0
    for start in range(0, len(text), SLICE_CHARS):
        tokens = model.tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
        count += max(0, len(tokens) - SEAM_TOKENS)
        if count > tokens_max:
            break
    return count
