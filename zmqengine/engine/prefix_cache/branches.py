"""Choice of the positions in a prompt at which to keep a checkpoint.

The ends of a prompt and of its output always get one. Other prompts are likely to branch off in four places: before the
head of the answer (a chat template's next turn often drops it with the reasoning), where an earlier prompt branched
off, where a waiting prompt does (`step/prefill_order.py`), and anywhere in a long prompt.
"""

from __future__ import annotations

from zmqengine.engine.prefix_cache.block import whole

# An upper bound of the head of an answer, as in "<|im_start|>assistant\n<think>\n".
_HEAD_TOKENS = 16
# Prefill of a shorter prompt takes no longer than the copy of a checkpoint.
_BRANCH_TOKENS_MIN = 256
_EVERY_TOKENS = 4096
_PERIODIC_MAX = 8


def branches(begin: int, end: int, known: int) -> list[int]:
    """Positions, in order, at which prefill of the tokens from `begin` to `end` keeps a checkpoint.

    `known`: tokens shared with cached prompts that go on differently. All positions are ends of whole blocks.
    """
    if end - begin < _BRANCH_TOKENS_MIN:
        return []
    every = max(_EVERY_TOKENS, end // _PERIODIC_MAX)
    found = {whole(end - _HEAD_TOKENS), whole(known), *range(whole(every), end, whole(every))}
    return sorted(position for position in found if begin < position < end)
