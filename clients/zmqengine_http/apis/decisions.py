"""POST /v1/decisions, and /v1/systemone, the path of TypeSafe's protocol, whose bodies and answers both have.

Source: https://docs.typesafe.ai/api.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import CacheScope, DeadlineMs, Priority
from zmqengine_client.text.decisions import Answered, DecideOptions, OneOf, Question, YesNo, questions_of
from zmqengine_http.apis.embeddings import client_of
from zmqengine_http.endpoint import Service, post
from zmqengine_http.generating.generation import caller_salt
from zmqengine_http.serving.body import Body, refused
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.serving.exchange import Exchange

_YES_NO_NAMES = ("noul", "bool", "boolean")
"""Names of peers for a question that is answered by yes or no; the answer has the name of its question."""


class DecisionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/decisions and /v1/systemone: a state, and questions about it by their names."""

    state: str | dict[str, object] | list[object]
    questions: Annotated[dict[str, dict[str, object]], Meta(min_length=1)]
    model: str | None = None
    priority: Priority = 0
    deadline_ms: DeadlineMs | None = None
    cache_scope: CacheScope | None = None


DECISION_BODY = Body(
    DecisionRequest,
    (
        refused("images", "describe them in the state", []),
        refused("audio", "write it down in the state"),
    ),
)


async def answer_decisions(service: Service, exchange: Exchange, request: DecisionRequest) -> None:
    """Respond with the probability of each answer to each question."""
    model = service.pool.model(request.model)
    try:
        questions = questions_of({name: _ours(question) for name, question in request.questions.items()})
    except BadRequest as error:
        raise bad_field("questions", error.message.removeprefix("questions: ")) from None
    options: DecideOptions = {
        "priority": request.priority,
        "deadline_ms": request.deadline_ms,
        "cache_scope": request.cache_scope,
        "adapter": model.adapter,
        "cache_salt": caller_salt(exchange.caller, request.cache_scope, model),
    }
    with client_of(service, exchange, model) as client:
        decided = await client.decide(request.state, questions, **options)
    exchange.facts |= {"questions": len(questions), "tokens": decided.computed_tokens}
    answers = {
        name: _document(answer, questions[name], str(request.questions[name].get("type")))
        for name, answer in decided.answers.items()
    }
    await exchange.send_json(
        {
            "id": f"decision-{secrets.token_hex(16)}",
            "object": "decision",
            "model": request.model or model.card.name,
            "answers": answers,
            "usage": {
                "input_tokens": decided.tokens,
                "output_tokens": 0,
                "computed_tokens": decided.computed_tokens,
            },
        }
    )


def _ours(question: dict[str, object]) -> dict[str, object]:
    """A question with our name for its type, and without nulls."""
    named = {**question, "type": "yes_no"} if question.get("type") in _YES_NO_NAMES else question
    return {key: value for key, value in named.items() if value is not None}


def _document(answer: Answered, question: Question, kind: str) -> dict[str, object]:
    """An answer in TypeSafe's form, and with the model's own certainty that it is one of those asked for."""
    told: dict[str, object] = {"type": kind, "coverage": answer.coverage}
    if isinstance(question, YesNo):
        return {**told, "noul" if kind == "noul" else "probability": answer.yes}
    told |= {"probabilities": answer.probabilities, "confidence": answer.confidence}
    if isinstance(question, OneOf):
        return {**told, "choice": answer.best}
    return {**told, "score": answer.score, "legend": question.answers()}


ENDPOINTS = tuple(
    post(
        path,
        DECISION_BODY,
        answer_decisions,
        "The probabilities of given answers to questions about one state",
    )
    for path in ("/v1/decisions", "/v1/systemone")
)
