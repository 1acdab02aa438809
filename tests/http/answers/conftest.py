"""A front-end on a model that says what a test wants, with tools and reasoning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.front import Front, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}</tool_call>'
FACTS: dict[str, str | bool | int] = {
    "tool_parser": "json_tools",
    "think_start": "<think>",
    "think_end": "</think>",
}


class Model:
    """What the model of the front-end says."""

    def __init__(self) -> None:
        self.text = ""
        self.client = ScriptedClient(lambda prompt: self.text, facts=FACTS)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def front(model: Model) -> Iterator[Front]:
    with serving(HttpConfig(), lambda *_: model.client) as front:  # type: ignore[arg-type]
        yield front
