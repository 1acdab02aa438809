"""Scores of documents: from the logits of a head, or from the two answers of a model that was asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.core.embedding import Ranked
from zmqengine_client.core.options import Options

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own, from its model card, as the rest of its prompt."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_SURE = 100.0
"""A bias that leaves two tokens only: all others together are less than a millionth as probable."""


class Reranked(NamedTuple):
    """Documents from the best to the worst, and the tokens that were read for it."""

    ranked: list[Ranked]
    tokens: int


class Answers(NamedTuple):
    """The tokens by which a model says that a document answers a query, or does not."""

    yes: int
    no: int

    @property
    def options(self) -> Options:
        """Generation of one of the two, with the log-probabilities of both."""
        bias = {self.yes: _SURE, self.no: _SURE}
        return {"max_tokens": 1, "logprobs": 2, "logit_bias": bias, "speculate": False}

    def score(self, logprobs: TokenLogprob) -> float:
        """The probability of yes."""
        return math.exp(min(0.0, dict(logprobs.top).get(self.yes, -math.inf)))


def question(query: str, document: str, instruction: str | None) -> tuple[str, str, str]:
    """The prompt of Qwen3-Reranker in three parts; the middle one, the document, may be cut."""
    before = f"{_BEFORE}<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
    return before, document, _AFTER


def probability(logits: Sequence[float]) -> float:
    """The probability that a head means: of its one label, or of the second of two. Raises `BadRequest`."""
    if len(logits) == 1:
        return _sigmoid(logits[0])
    if len(logits) == 2:
        return _sigmoid(logits[1] - logits[0])
    raise BadRequest(f"the model is a classifier with {len(logits)} labels and no reranker")


def ranked(scores: Sequence[float]) -> list[Ranked]:
    """Documents from the best to the worst; those of the same score in their own order."""
    ranking = [Ranked(index, score) for index, score in enumerate(scores)]
    return sorted(ranking, key=lambda each: -each.score)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
