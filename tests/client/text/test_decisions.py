"""The probabilities of answers by their log-probabilities, and the prompts that ask for them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from zmqengine.errors import BadRequest
from zmqengine.pico import model_path
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client import OneOf, Score, YesNo
from zmqengine_client.text.decisions import Question, answered, asked_questions, questions_of
from zmqengine_client.text.tokenizer import Tokenizer

HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
ALWAYS_OPEN = "{% for m in messages %}[{{ m.content }}]{% endfor %}<think>\n{# </think> #}"
SWITCHED = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)


def tokenizer(template: str) -> Tokenizer:
    """Pico's tokenizer with another chat template."""
    return Tokenizer(
        TokenizerBundle(
            call=0,
            hash="x",
            tokenizer_json=Path(model_path(), "tokenizer.json").read_bytes(),
            eos_token_ids=[0],
            chat_template=template,
        )
    )


def test_probabilities_are_those_of_the_answers_among_themselves() -> None:
    """The coverage is what the model gives to all of them together."""
    given = answered({"yes": [1], "no": [2, 3]}, [math.log(0.3), math.log(0.1)])
    assert given.probabilities == pytest.approx({"yes": 0.75, "no": 0.25})
    assert given.coverage == pytest.approx(0.4)
    assert given.best == "yes"
    assert given.yes == pytest.approx(0.75)


def test_a_longer_answer_is_not_counted_for_the_one_that_it_begins_with() -> None:
    """A third one in the chain is taken off once."""
    answers = {"red": [1], "red wine": [1, 2], "red wine jug": [1, 2, 3], "blue": [4]}
    given = answered(answers, [math.log(p) for p in (0.6, 0.5, 0.1, 0.2)])
    assert given.probabilities == pytest.approx(
        {"red": 0.125, "red wine": 0.5, "red wine jug": 0.125, "blue": 0.25}
    )
    assert given.coverage == pytest.approx(0.8)


def test_answers_too_improbable_for_a_float_still_compare() -> None:
    """Long answers have log-probabilities in the thousands."""
    given = answered({"a": [1], "b": [2]}, [-2000.0, -2000.0 + math.log(3)])
    assert given.probabilities == pytest.approx({"a": 0.25, "b": 0.75})
    assert given.coverage == 0.0


def test_confidence_falls_from_one_to_nothing() -> None:
    """Certain, even, and one answer alone."""
    assert answered({"a": [1], "b": [2]}, [0.0, -1000.0]).confidence == pytest.approx(1.0)
    assert answered({"a": [1], "b": [2]}, [-1.0, -1.0]).confidence == pytest.approx(0.0)
    assert answered({"a": [1]}, [-1.0]).confidence == 1.0


def test_a_score_is_the_expected_level() -> None:
    """Levels count from 0."""
    given = answered({"0": [1], "1": [2], "2": [3]}, [math.log(p) for p in (0.2, 0.2, 0.6)])
    assert given.score == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>"),
        (ALWAYS_OPEN, "]<think>\n\n</think>\n\n"),
        (SWITCHED, "]<think></think>"),
    ],
)
def test_the_answer_begins_behind_the_reasoning(template: str, ending: str) -> None:
    """Whatever the state says: its own markers open nothing."""
    read = tokenizer(template)
    questions: dict[str, Question] = {
        "q": YesNo(instructions="Is it?"),
        "w": OneOf(instructions="Which?", criteria=["a", "b", "c"]),
    }
    for state in ("It is.", "<think>", "</think>"):
        for asked in asked_questions(read, state, questions):
            assert read.decode(asked.prompt, skip_special_tokens=False).endswith(ending)


def test_a_prompt_begins_with_the_state_and_shows_the_criteria() -> None:
    """A state that is no text is JSON."""
    read = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    questions: dict[str, Question] = {
        "a": YesNo(instructions="Is it?", criteria={"true": "it is blue"}),
        "b": Score(instructions="How far?", criteria=["near", "far"]),
    }
    first, second = asked_questions(read, {"tom": [1, 2]}, questions)
    shown = read.decode(first.prompt)
    assert shown.startswith('{"tom":[1,2]}\n\nIs it?\n')
    assert "yes: it is blue\n" in shown
    assert shown.endswith("else: yes, no.")
    assert "0: near\n1: far\n" in read.decode(second.prompt)
    assert list(second.answers) == ["0", "1"]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"type": "maybe", "instructions": "x"}, "questions.q: .*'maybe'"),
        ({"type": "choice", "instructions": "x"}, "questions.q: .*`criteria`"),
        ({"type": "choice", "instructions": "x", "criteria": ["a", "a"]}, "twice"),
        ({"type": "choice", "instructions": "x", "criteria": []}, "questions.q"),
        ({"type": "score", "instructions": "x", "criteria": ["l"] * 11}, "questions.q"),
        ({"type": "yes_no", "instructions": ""}, "questions.q"),
        ({"type": "yes_no", "instructions": "x", "criteria": {"perhaps": "y"}}, "yes and no"),
        ({"type": "yes_no", "instructions": "x", "level": 1}, "`level`"),
    ],
)
def test_a_question_that_cannot_be_asked_is_named(question: dict[str, object], message: str) -> None:
    """Before anything is sent."""
    with pytest.raises(BadRequest, match=message):
        questions_of({"q": question})
