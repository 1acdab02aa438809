"""Where in a prompt a state that cannot be cut is worth keeping: where other prompts are likely to turn off.

The end of a prompt, and of an output, is kept in any case. The next prompt of a conversation may turn off a little
before: its head for an answer, and the reasoning after it, are often left out then. Other prompts turn off where
one did before, or where one does that waits already. And in a long prompt nobody knows.
"""

from __future__ import annotations

from zmqengine.engine.prefix_cache.keys import BLOCK_TOKENS

# More than the head of an answer takes: "<|im_start|>assistant\n<think>\n" and its like.
_HEAD_TOKENS = 16
# A shorter prompt is read again as fast as a state is kept.
_BRANCH_TOKENS_MIN = 256
_EVERY_TOKENS = 4096
_PERIODIC_MAX = 8


def branches(begin: int, end: int, known: int) -> list[int]:
    """Positions at which to keep the state while the tokens from `begin` to `end` are read, the first one first.

    `known` tokens are kept for others who went on differently. All are ends of whole blocks.
    """
    if end - begin < _BRANCH_TOKENS_MIN:
        return []
    every = max(_EVERY_TOKENS, end // _PERIODIC_MAX)
    found = {whole(end - _HEAD_TOKENS), whole(known), *range(whole(every), end, whole(every))}
    return sorted(position for position in found if begin < position < end)


def whole(tokens: int) -> int:
    """The end of the last whole block of so many tokens."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
