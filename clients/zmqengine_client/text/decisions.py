"""Decisions: questions about one state, and the probability of each answer to them.

The probability of an answer is that of its tokens behind the question, by the log-probabilities of `forced` output;
nothing is sampled. The state stands first in every prompt, so that the prefix cache holds it after the first question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
from msgspec import Meta, Struct

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import CacheScope
from zmqengine_client.text.reasoning import thinking_markers
from zmqengine_client.text.tokenizer import Tokenizer

CHOICES_MAX = 255
LEVELS_MAX = 10
"""Levels of a score, so that each is one digit; this bound and that of choices are TypeSafe's, whose protocol
`/v1/systemone` is."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which a chat template leaves out the reasoning."""

Name = Annotated[str, Meta(min_length=1)]


class YesNo(Struct, frozen=True, kw_only=True, tag="yes_no", forbid_unknown_fields=True):
    """A question whose answers are yes and no; `criteria` may say when it is which."""

    instructions: Name
    criteria: dict[str, str | None] = {}

    def answers(self) -> dict[str, str | None]:
        """The answers with their descriptions. Raises `BadRequest`."""
        told = {_YES_NO.get(key.lower(), key): text for key, text in self.criteria.items()}
        if not told.keys() <= {"yes", "no"}:
            raise BadRequest("criteria: those of a question for yes or no are yes and no, or true and false")
        return {"yes": told.get("yes"), "no": told.get("no")}


class OneOf(Struct, frozen=True, kw_only=True, tag="choice", forbid_unknown_fields=True):
    """A question with an answer out of several: names, or a mapping of names to descriptions."""

    instructions: Name
    criteria: (
        Annotated[dict[Name, str | None], Meta(min_length=1, max_length=CHOICES_MAX)]
        | Annotated[list[Name], Meta(min_length=1, max_length=CHOICES_MAX)]
    )

    def answers(self) -> dict[str, str | None]:
        """The answers with their descriptions. Raises `BadRequest`."""
        if isinstance(self.criteria, dict):
            return self.criteria
        if len(set(self.criteria)) < len(self.criteria):
            raise BadRequest("criteria: a choice is there twice")
        return dict.fromkeys(self.criteria)


class Score(Struct, frozen=True, kw_only=True, tag="score", forbid_unknown_fields=True):
    """A question for a level: the descriptions of the levels, from 0 up."""

    instructions: Name
    criteria: Annotated[list[Name], Meta(min_length=1, max_length=LEVELS_MAX)]

    def answers(self) -> dict[str, str | None]:
        """The answers with their descriptions."""
        return {str(level): text for level, text in enumerate(self.criteria)}


Question = YesNo | OneOf | Score
_YES_NO = {"true": "yes", "false": "no", "yes": "yes", "no": "no"}


class DecideOptions(TypedDict, total=False):
    """Options of `decide`: those of the same names of a generation."""

    priority: int
    deadline_ms: int | None
    cache_scope: CacheScope | None
    cache_salt: str
    adapter: str


class Answered(Struct, frozen=True, kw_only=True):
    """The probability of each answer to one question; they sum to 1.

    `coverage` is the probability that the model's own answer begins with one of them. A small one tells that the model
    would have said something else.
    """

    probabilities: dict[str, float]
    coverage: float

    @property
    def best(self) -> str:
        """The most probable answer; of several, the first."""
        return max(self.probabilities, key=lambda answer: self.probabilities[answer])

    @property
    def yes(self) -> float:
        """The probability of yes. Raises KeyError for another type of question."""
        return self.probabilities["yes"]

    @property
    def score(self) -> float:
        """The expected level. Raises ValueError for another type of question."""
        return sum(int(level) * probability for level, probability in self.probabilities.items())

    @property
    def confidence(self) -> float:
        """1 for one certain answer, 0 for answers of the same probability: 1 less the entropy by its maximum."""
        values = self.probabilities.values()
        if len(values) == 1:
            return 1.0
        return 1.0 + sum(p * math.log(p) for p in values if p > 0) / math.log(len(values))


class Decisions(NamedTuple):
    """The answers by the names of their questions.

    `tokens` are those of the prompts, the state in each of them; `computed_tokens` those that the worker computed, as
    it had the others in its prefix cache.
    """

    answers: dict[str, Answered]
    tokens: int
    computed_tokens: int


class AskedQuestion(NamedTuple):
    """The prompt of a question, and the tokens of each of its answers."""

    prompt: list[int]
    answers: dict[str, list[int]]


def questions_of(asked: Mapping[str, Question | Mapping[str, object]]) -> dict[str, Question]:
    """Questions as structs; a mapping has the `type` yes_no, choice or score. Raises `BadRequest` with the name of the
    question."""
    if not asked:
        raise BadRequest("questions: at least one is needed")
    questions: dict[str, Question] = {}
    for name, question in asked.items():
        try:
            questions[name] = msgspec.convert(
                question if isinstance(question, Mapping) else msgspec.to_builtins(question), Question
            )
            questions[name].answers()
        except (msgspec.ValidationError, BadRequest, TypeError) as error:
            raise BadRequest(f"questions.{name}: {error}") from None
    return questions


def asked_questions(
    tokenizer: Tokenizer, state: object, questions: Mapping[str, Question]
) -> list[AskedQuestion]:
    """Prompts and answers as token ids. `state` is a text, or anything that JSON can write. Slow for a long state."""
    text = state if isinstance(state, str) else msgspec.json.encode(state).decode()
    asked = []
    for name, question in questions.items():
        answers = {
            answer: tokenizer.encode(answer, add_special_tokens=False) for answer in question.answers()
        }
        for answer, ids in answers.items():
            if not ids:
                raise BadRequest(f"questions.{name}: the answer {answer!r} has no tokens")
        asked.append(AskedQuestion(_prompt(tokenizer, text, question), answers))
    return asked


def answered(answers: Mapping[str, Sequence[int]], logprobs: Sequence[float]) -> Answered:
    """The probabilities of answers by the log-probabilities of their tokens, of each answer the sum.

    An output that begins with a longer answer is that one, and none of the shorter one that it begins with.
    """
    shift = max(logprobs)
    if not math.isfinite(shift):
        raise BadRequest("the model gives none of the answers a probability")
    begins = {answer: math.exp(each - shift) for answer, each in zip(answers, logprobs, strict=True)}
    own: dict[str, float] = {}
    for answer in sorted(answers, key=lambda each: -len(answers[each])):
        ids = list(answers[answer])
        longer = (own[each] for each in own if list(answers[each][: len(ids)]) == ids)
        own[answer] = max(0.0, begins[answer] - sum(longer))
    whole = sum(own.values())
    return Answered(
        probabilities={answer: own[answer] / whole for answer in answers},
        coverage=min(1.0, whole * math.exp(shift)),
    )


def _prompt(tokenizer: Tokenizer, state: str, question: Question) -> list[int]:
    """A chat of one message, up to where the answer begins; the reasoning is left out, or closed at once."""
    answers = question.answers()
    criteria = "".join(
        f"{answer}: {text}\n" if text else f"{answer}\n"
        for answer, text in answers.items()
        if text or len(answers) > 2
    )
    last = f"Answer with one of these and nothing else: {', '.join(answers)}."
    message = f"{state}\n\n{question.instructions}\n{criteria}{last}"
    off: dict[str, Any] = {name: False for name in _SWITCHES if name in tokenizer.template_variables}
    text = tokenizer.apply_chat_template([{"role": "user", "content": message}], **off)
    return tokenizer.encode(_without_reasoning(tokenizer, text, last), add_special_tokens=False)


def _without_reasoning(tokenizer: Tokenizer, text: str, last: str) -> str:
    """A prompt that ends where the answer begins; `last` ends the message in it."""
    markers = thinking_markers(tokenizer.facts, tokenizer.chat_template)
    if markers is None:
        return text
    if markers.messages:
        begun = next(
            size for size in range(len(markers.answer), -1, -1) if text.endswith(markers.answer[:size])
        )
        return text + markers.answer[begun:]
    if markers.are_open(text.rpartition(last)[2]):
        return f"{text.rstrip()}\n\n{markers.end}\n\n"
    return text
