"""POST /v1/decisions and /v1/systemone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.http.front import Front, post
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient

STATE = {"ticket": "The page stays empty after I have paid.", "minutes": 43}
QUESTIONS: dict[str, dict[str, Any]] = {
    "bug": {"type": "noul", "instructions": "Is it a fault of the software?", "criteria": None},
    "paid": {"type": "yes_no", "instructions": "Has the customer paid?"},
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": "money", "frontend": None, "accounts": None},
    },
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["later", "this week", "now"]},
}


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_each_question_has_its_answer(front: Front, worker: FakeWorker, path: str) -> None:
    """With the numbers of the client library, under the names of TypeSafe's protocol."""

    async def decide() -> Any:
        async with AsyncClient(worker.address) as client:
            asked = {**QUESTIONS, "bug": {"type": "yes_no", "instructions": QUESTIONS["bug"]["instructions"]}}
            return (await client.decide(STATE, asked)).answers

    expected = asyncio.run(decide())
    reply = post(front, path, {"state": STATE, "questions": QUESTIONS})
    assert reply.status == 200, reply.body
    answers = reply.json["answers"]
    assert list(answers) == list(QUESTIONS)
    assert {name: answer.pop("type") for name, answer in answers.items()} == {
        name: question["type"] for name, question in QUESTIONS.items()
    }
    for name, answer in answers.items():
        assert answer.pop("coverage") == pytest.approx(expected[name].coverage)
    assert answers["bug"] == {"noul": pytest.approx(expected["bug"].yes)}
    assert answers["paid"] == {"probability": pytest.approx(expected["paid"].yes)}
    assert answers["team"]["choice"] == expected["team"].best
    assert answers["team"]["probabilities"] == pytest.approx(expected["team"].probabilities)
    assert answers["team"]["confidence"] == pytest.approx(expected["team"].confidence)
    assert answers["urgency"]["score"] == pytest.approx(expected["urgency"].score)
    assert answers["urgency"]["legend"] == {"0": "later", "1": "this week", "2": "now"}
    usage = reply.json["usage"]
    assert usage["output_tokens"] == 0
    assert usage["input_tokens"] > 0


@pytest.mark.process
def test_the_client_of_the_protocol_reads_the_answers(front: Front) -> None:
    """TypeSafe's own, with nothing but another address."""
    sdk = pytest.importorskip("typesafe_sdk")
    with sdk.TypeSafeClient(api_key="none", base_url=front.url, model="fake") as client:
        response = client.system_one(
            state=STATE,
            questions={
                "bug": sdk.Noul(instructions="Is it a fault of the software?"),
                "team": sdk.Choice(
                    instructions="Which team?", criteria={"billing": None, "frontend": "the page"}
                ),
                "urgency": sdk.Score(instructions="How urgent?", criteria=["later", "now"]),
            },
        )
    assert 0 <= response.nouls["bug"].noul <= 1
    assert response.choices["team"].choice in ("billing", "frontend")
    assert 0 <= response.scores["urgency"].score <= 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"questions": QUESTIONS}, "state", "state"),
        ({"state": "x", "questions": {}}, "questions", ""),
        (
            {"state": "x", "questions": {"q": {"type": "maybe", "instructions": "x"}}},
            "questions",
            "questions.q",
        ),
        (
            {"state": "x", "questions": {"q": {"type": "choice", "instructions": "x"}}},
            "questions",
            "criteria",
        ),
        ({"state": "x", "questions": QUESTIONS, "images": ["a"]}, "images", "not supported"),
        ({"state": "x", "questions": QUESTIONS, "model": "jev-latest"}, "model", "jev-latest"),
    ],
)
def test_a_body_that_cannot_be_answered_is_named(
    front: Front, body: dict[str, object], param: str, words: str
) -> None:
    """As in every other API."""
    reply = post(front, "/v1/decisions", body)
    assert reply.status in (400, 404)
    assert reply.error["param"] == param
    assert words in reply.error["message"]
