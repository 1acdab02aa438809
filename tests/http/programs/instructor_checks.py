"""Instructor's objects from a model that is held to them: `python instructor_checks.py URL MODEL`, a line a check."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import instructor  # type: ignore[import-not-found, unused-ignore]
import openai
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1] + "/v1", sys.argv[2]
OPTIONS = {"max_retries": 0, "max_tokens": 300, "temperature": 0.7, "seed": 1, "frequency_penalty": 0.5}
"""Drawn with a seed: a small model writes white space between two fields for as long as it may, every now and then."""


class Person(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]
    age: int = Field(ge=0, le=120)


def made(mode: Any) -> Callable[[], None]:
    """A check of one of its modes."""

    def check() -> None:
        client = instructor.from_openai(
            openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60), mode=mode
        )
        person = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Tell me about Tom."}], response_model=Person,
            **OPTIONS,
        )  # fmt: skip
        assert isinstance(person, Person), person

    return check


def partial() -> None:
    """The object while it is written."""
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
    seen = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=[{"role": "user", "content": "Tell me about Tom."}], response_model=Person,
            **OPTIONS,
        )
    )  # fmt: skip
    assert len(seen) > 2
    Person.model_validate(seen[-1].model_dump())


CHECKS = {
    "tools": made(instructor.Mode.TOOLS),
    "tools, strict": made(instructor.Mode.TOOLS_STRICT),
    "JSON schema": made(instructor.Mode.JSON_SCHEMA),
    "partial": partial,
}
for name, check in CHECKS.items():
    error = None
    try:
        check()
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is the result
        error = f"{type(raised).__name__}: {raised}"[:300]
    print(json.dumps({"name": name, "error": error}))
