"""What a run does that makes pico-tools of pico."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tools.pico.corpus import Document
from tools.pico.tools import corpus

_NOTHING = 0.01


@dataclass(frozen=True)
class Plan:
    """The defaults are those of the bundled model. Rates are those of the beginning, token counts those of a step."""

    seed: int = 1
    matrix_rate: float = 0.01
    other_rate: float = 0.004
    tokenizer_documents: int = 8000
    pieces: int = 1400
    spaced_words: int = 640
    batch_tokens: int = 2048
    tool_steps: int = 497
    name_steps: int = 315
    name_fall_steps: int = 900
    near_steps: int = 157
    near_fall_steps: int = 700
    short_batch_tokens: int = 1024
    short_steps: int = 570
    last_steps: int = 480
    long_tokens: int = 1200
    held_out_documents: int = 300


class Stage(NamedTuple):
    """`steps` steps of `batch_tokens` over `documents`.

    Learning rates begin where the stage before left them and fall in a straight line; only `fall_steps` steps would
    take them to `end` of that. A gap is in the positions of a `gap_share` of the batches.
    """

    name: str
    steps: int
    fall_steps: int
    end: float
    gap_share: float
    batch_tokens: int
    documents: Iterator[Document]


def stages(plan: Plan) -> list[Stage]:
    """What is learnt, in order.

    Documents of all kinds; then many with names that cannot be guessed; the same without gaps, which keep a model
    from learning to copy; short ones with one tool, then with more; at last what it is to do in the end.
    """
    seed = plan.seed
    usual, short = plan.batch_tokens, plan.short_batch_tokens
    all_kinds = corpus.documents("train", seed + 3)
    names = corpus.name_lessons("train", seed + 4, 0.7)
    near = corpus.name_lessons("train", seed + 5, 0.4)
    few = corpus.short_lessons("train", seed + 7)
    last = corpus.last_lessons("train", seed + 8, plan.long_tokens)
    return [
        Stage("tools", plan.tool_steps, plan.tool_steps, 1.0, 0.5, usual, all_kinds),
        Stage("names", plan.name_steps, plan.name_fall_steps, 0.3, 0.5, usual, names),
        Stage("near", plan.near_steps, plan.near_fall_steps, 0.2, 0.0, usual, near),
        Stage("short", plan.short_steps, plan.short_steps, 1.0, 0.0, short, few),
        Stage("last", plan.last_steps, plan.last_steps, _NOTHING, 0.25, short, last),
    ]
