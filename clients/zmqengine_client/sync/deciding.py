# Made from ../aio/deciding.py by `python -m tools`: change that one.
"""Decide: the probabilities of given answers, each a row of forced output behind the prompt of its question."""

from __future__ import annotations

from collections.abc import Mapping

from zmqengine_client.core.request import new_request, set_token_prompt
from zmqengine_client.sync.in_flight import InFlight
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.model_tokenizer import ModelTokenizer
from zmqengine_client.sync.waiting import off_loop
from zmqengine_client.text.decisions import (
    DecideOptions,
    Decisions,
    Question,
    answered,
    asked_questions,
)

IN_FLIGHT = 64
"""Answers of one call in flight."""


class Deciding:
    """The decisions of one client."""

    def __init__(self, driver: IoThread, tokenizer: ModelTokenizer) -> None:
        self._driver = driver
        self._tokenizer = tokenizer

    def decide(self, state: object, questions: Mapping[str, Question], options: DecideOptions) -> Decisions:
        """The answers to all questions. The worker reads the state once: rows wait for the first one that reads it."""
        tokenizer = self._tokenizer.get()
        asked = off_loop(asked_questions, tokenizer, state, questions)
        rows = [(question.prompt, ids) for question in asked for ids in question.answers.values()]
        logprobs: list[float] = []
        computed = 0
        in_flight = InFlight(self._driver)
        try:
            for index, (prompt, ids) in enumerate(rows):
                # Nothing is drawn, whatever the seed.
                request = new_request(
                    {
                        "forced": ids,
                        "max_tokens": len(ids),
                        "logprobs": 0,
                        "seed": 0,
                        "priority": options.get("priority", 0),
                        "deadline_ms": options.get("deadline_ms"),
                        "cache_scope": options.get("cache_scope"),
                        "cache_salt": options.get("cache_salt", ""),
                        "adapter": options.get("adapter", ""),
                    }
                )
                set_token_prompt(request, prompt)
                in_flight.start(request)
                while len(in_flight) >= IN_FLIGHT or (in_flight and index + 1 == len(rows)):
                    done = in_flight.take_oldest()
                    assert done.logprobs is not None
                    logprobs.append(sum(each.logprob for each in done.logprobs))
                    computed += len(done.prompt) - done.completion().cached_tokens
        finally:
            in_flight.abort()
        answers = {}
        for name, question in zip(questions, asked, strict=True):
            count = len(question.answers)
            answers[name] = answered(question.answers, logprobs[:count])
            del logprobs[:count]
        return Decisions(answers, sum(len(question.prompt) for question in asked), computed)
