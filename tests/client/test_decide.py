"""`decide` of both halves of the client, on a real model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="a worker needs it; a front-end runs without")

import mlx.core as mx
from mlx_lm import load

from tests.support.workers import WorkerProcess
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS
from zmqengine.pico import model_path
from zmqengine_client import AsyncClient, Client, OneOf, Score, YesNo
from zmqengine_client.core.request import Request
from zmqengine_client.errors import BadRequest, ContextExceeded
from zmqengine_client.sync.in_flight import InFlight
from zmqengine_client.text.decisions import Answered, Question, asked_questions

QUESTIONS: dict[str, Question] = {
    "glad": YesNo(instructions="Is Tom glad?"),
    "colour": OneOf(instructions="Which colour has the ball?", criteria=["red", "blue", "red and blue"]),
    "big": Score(instructions="How big is it?", criteria=["small", "big", "very big"]),
}
STATE = "Tom has a red ball. He is glad. " * 20


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A worker of pico-tools, the bundled model that chats."""
    with WorkerProcess(None, model="pico-tools", supervise=False) as worker:
        yield worker


def test_probabilities_are_those_of_the_model(worker: WorkerProcess) -> None:
    """By the logits of mlx-lm's own forward pass over prompt and answer."""
    model = load(str(model_path("pico-tools")))[0]
    with Client(worker.address, connect_timeout_s=60) as client:
        decided = client.decide(STATE, QUESTIONS)
        asked = asked_questions(client.tokenizer(), STATE, QUESTIONS)
    assert list(decided.answers) == list(QUESTIONS)
    for question, answered in zip(asked, decided.answers.values(), strict=True):
        begins = {}
        for answer, ids in question.answers.items():
            logits = model(mx.array([[*question.prompt, *ids]]))[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            first = len(question.prompt) - 1
            total = sum(float(np.array(logprobs[first + index, id_])) for index, id_ in enumerate(ids))
            begins[answer] = math.exp(total)
        if "red and blue" in begins:
            begins["red"] -= begins["red and blue"]
        whole = sum(begins.values())
        assert answered.coverage == pytest.approx(whole, rel=0.05)
        assert answered.probabilities == pytest.approx(
            {answer: own / whole for answer, own in begins.items()}, abs=0.02
        )


def test_the_state_is_read_once(worker: WorkerProcess) -> None:
    """Eight answers to three questions about a state that is not cached."""
    state = f"Once upon a time. {STATE}{STATE}"
    with Client(worker.address, connect_timeout_s=60) as client:
        decided = client.decide(state, QUESTIONS)
        asked = asked_questions(client.tokenizer(), state, QUESTIONS)
        read = len(client.tokenizer().encode(state))
    rows = [len(question.prompt) - read for question in asked for _ in question.answers]
    assert decided.tokens == sum(len(question.prompt) for question in asked)
    # Each row computes its question, and what of the state is in no whole block.
    assert decided.computed_tokens < read + sum(own + BLOCK_TOKENS for own in rows)


def test_answers_are_computed_together(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight are with the worker before the first is awaited."""
    waits: list[int] = []
    take_oldest = InFlight.take_oldest

    def counted(requests: InFlight) -> Request:
        waits.append(len(requests))
        return take_oldest(requests)

    monkeypatch.setattr(InFlight, "take_oldest", counted)
    with Client(worker.address, connect_timeout_s=60) as client:
        client.decide(STATE, QUESTIONS)
    assert waits == [8, 7, 6, 5, 4, 3, 2, 1]


def test_the_asynchronous_half_decides_the_same(worker: WorkerProcess) -> None:
    """Several calls at once; mappings in the place of structs."""
    mappings: dict[str, dict[str, object]] = {
        "glad": {"type": "yes_no", "instructions": "Is Tom glad?"},
        "colour": {
            "type": "choice",
            "instructions": "Which colour has the ball?",
            "criteria": ["red", "blue", "red and blue"],
        },
    }

    async def run() -> list[dict[str, Answered]]:
        async with AsyncClient(worker.address, connect_timeout_s=60) as client:
            return [
                made.answers
                for made in await asyncio.gather(*(client.decide(STATE, mappings) for _ in range(3)))
            ]

    with Client(worker.address, connect_timeout_s=60) as client:
        expected = {name: QUESTIONS[name] for name in mappings}
        answers = client.decide(STATE, expected).answers
    for made in asyncio.run(run()):
        assert {name: answer.best for name, answer in made.items()} == {
            name: answer.best for name, answer in answers.items()
        }


def test_what_cannot_be_decided_is_told(worker: WorkerProcess) -> None:
    """Nothing asked, no such option, a state beyond the context."""
    with Client(worker.address, connect_timeout_s=60) as client:
        with pytest.raises(BadRequest, match="at least one"):
            client.decide("x", {})
        with pytest.raises(TypeError, match="temperature"):
            client.decide("x", QUESTIONS, temperature=1.0)  # type: ignore[call-arg]
        with pytest.raises(ContextExceeded):
            client.decide(STATE * 100, QUESTIONS)
