"""Client programs that others wrote, against a front-end whose model is scripted.

They are not among our dependencies: `ZMQENGINE_TEST_PROGRAMS` names a directory with `node_modules` (openai, zod, ai,
@ai-sdk/openai, @ai-sdk/openai-compatible) and `litellm/bin/python`; docs/http-clients.md has the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.http.front import Front, serving
from tests.http.programs.programs_of_others import results_of, wanted
from tests.http.scripted import ScriptedClient, ScriptedStream
from zmqengine.protocol.messages import Constraint, Description
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process


def say(prompt: str) -> str:
    """A model that adds when it has a tool, and otherwise says what it was asked."""
    if "without end" in prompt:
        return "word " * 400
    if "tool: 3" in prompt:
        return "It is 3."
    if "tools:" in prompt:
        return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    return "You said: " + prompt.rpartition("user: ")[2].split("\n")[0]


class ObedientClient(ScriptedClient):
    """A worker that holds its model to a constraint: it says what fits those of the programs."""

    async def describe(self) -> Description:
        description = await super().describe()
        assert description.limits
        limits = msgspec.structs.replace(description.limits, constraints=True)
        return msgspec.structs.replace(description, limits=limits)

    def generate_tokens(self, prompt: Sequence[int], **options: object) -> ScriptedStream:
        constraint = options.get("constraint")
        self.say = say
        if isinstance(constraint, Constraint) and constraint.kind in ("json", "json_schema", "json_object"):
            self.say = lambda text: '{"sum": 3}'
        stream = super().generate_tokens(prompt, **options)
        said = self.say(stream._text)
        stream._client = ScriptedClient(lambda text: said)
        return stream


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    client = ObedientClient(say, facts={"tool_parser": "json_tools"})
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.mark.slow
@wanted
@pytest.mark.parametrize("program", ["openai_node.mjs", "ai_sdk.mjs", "litellm_checks.py"])
def test_a_program_of_others_works(front: Front, program: str, tmp_path: Path) -> None:
    """Every check; all results are printed."""
    results = results_of(program, front.url, environment="litellm", scratch=tmp_path)
    assert len(results) > 10
    assert not {result["name"]: result["error"] for result in results if result["error"]}
