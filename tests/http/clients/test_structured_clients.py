"""Structured output of programs that others wrote, unchanged, from a bundled model that is held to it.

langchain and `llm` are in the environment of the tests. Vercel's AI SDK and Instructor are not:
`ZMQENGINE_TEST_PROGRAMS` names a directory with `node_modules` (ai, zod, @ai-sdk/openai,
@ai-sdk/openai-compatible) and `instructor/bin/python`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.http.front import Front, serving
from tests.http.programs.programs_of_others import ENDS_S, results_of, wanted
from tests.support.workers import WorkerProcess
from zmqengine.pico import model_path
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

MODEL = "pico-tools"
ASK: Any = [{"role": "user", "content": "What is the time in Seville?"}]


class Person(BaseModel):
    """Somebody in a story."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with WorkerProcess(None, model=MODEL) as worker:
        with worker.client() as native:
            native.wait_ready()
        with serving(HttpConfig(workers=(worker.address,))) as front:
            yield front


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gives_objects(front: Front, method: Any) -> None:
    """`with_structured_output`, by each of its methods; any JSON is all that json_mode asks for."""
    # It takes seconds, and of the processes of a run only this one needs it.
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=front.url + "/v1", api_key=SecretStr("none"), model=MODEL, timeout=60, max_retries=0,
        max_completion_tokens=300, temperature=0.7, seed=1, frequency_penalty=0.5,
    )  # fmt: skip
    shape: Any = dict[str, Any] if method == "json_mode" else Person
    asked = chat.with_structured_output({"type": "object"} if method == "json_mode" else shape, method=method)
    answer = asked.invoke("Tell me about Tom as JSON.")
    assert isinstance(answer, dict if method == "json_mode" else Person)


@pytest.mark.slow
def test_llm_gives_json_of_a_schema(front: Front, tmp_path: Path) -> None:
    """`llm --schema`, with a model that its own file says can."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {front.url}/v1\n  api_key_name: none\n"
        "  supports_schema: true\n"
    )
    schema = {**Person.model_json_schema(), "additionalProperties": False}
    command = [sys.executable, "-m", "llm", "-m", "ours", "--key", "none", "-n", "-o", "max_tokens", "300"]
    said = run([*command, "--schema", json.dumps(schema), "Tell me about Tom."], LLM_USER_PATH=str(tmp_path))
    jsonschema.validate(json.loads(said), schema)


def test_a_strict_tool_that_the_model_chooses_to_call_follows_its_schema(front: Front) -> None:
    """In each API. Without `strict` the model says the city that it was asked about; held to it, one that there is."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Utrecht", "Leiden"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    for strict, cities in ((False, {"Seville"}), (True, {"Utrecht", "Leiden"})):
        about = {"name": "current_time", "description": "Tells what time it is.", "strict": strict}
        with openai.OpenAI(base_url=front.url + "/v1", api_key="-", max_retries=0, timeout=60) as client:
            chat: Any = client.chat.completions.create(
                model=MODEL, messages=ASK, temperature=0,
                tools=[{"type": "function", "function": {**about, "parameters": parameters}}],  # type: ignore[list-item, typeddict-item]
            )  # fmt: skip
            response: Any = client.responses.create(
                model=MODEL, input=ASK, temperature=0,
                tools=[{"type": "function", **about, "parameters": parameters}],  # type: ignore[list-item, misc]
            )  # fmt: skip
        with anthropic.Anthropic(base_url=front.url, api_key="-", max_retries=0, timeout=60) as claude:
            message: Any = claude.messages.create(
                model=MODEL, messages=ASK, max_tokens=200, extra_body={"temperature": 0},
                tools=[{**about, "input_schema": parameters}],  # type: ignore[list-item, typeddict-item]
            )  # fmt: skip
        assert chat.choices[0].finish_reason == "tool_calls"
        assert message.stop_reason == "tool_use"
        calls = [
            json.loads(chat.choices[0].message.tool_calls[0].function.arguments),
            json.loads(response.output[-1].arguments),
            message.content[-1].input,
        ]
        assert [call["city"] in cities for call in calls] == [True] * 3, calls


@pytest.mark.slow
@wanted
@pytest.mark.parametrize("program", ["structured_objects.mjs", "instructor_checks.py"])
def test_a_program_of_others_gets_its_objects(front: Front, program: str, tmp_path: Path) -> None:
    """Every check; the results are printed."""
    results = results_of(program, front.url, MODEL, environment="instructor", scratch=tmp_path)
    assert len(results) >= 4
    assert {result["name"]: result["error"] for result in results if result["error"]} == {}


@pytest.mark.slow
@pytest.mark.timeout(ENDS_S)
@wanted
@pytest.mark.parametrize(
    ("program", "environment", "checks_min"),
    [
        ("anthropic_node.mjs", "", 19),
        ("frameworks_checks.py", "frameworks", 25),
        ("frameworks_checks.py", "llama-index", 3),
    ],
)
def test_a_program_of_others_works_with_a_real_model(
    front: Front, program: str, environment: str, checks_min: int, tmp_path: Path
) -> None:
    """Answers, streams and tool loops."""
    results = results_of(program, front.url, MODEL, environment=environment, scratch=tmp_path)
    assert len(results) >= checks_min
    assert {result["name"]: result["error"] for result in results if result["error"]} == {}


@pytest.mark.slow
@pytest.mark.timeout(ENDS_S)
@wanted
def test_lm_evaluation_harness_scores_answers(front: Front, tmp_path: Path) -> None:
    """A multiple-choice task, by echoed log-probabilities."""
    tokenizer = str(model_path("pico-tools"))
    results = results_of(
        "lm_eval_checks.py", front.url, MODEL, tokenizer, environment="lm-eval", scratch=tmp_path
    )
    assert {result["name"]: result["error"] for result in results} == {
        "accuracy": "", "the model's own answer is greedy": "", "its log-probability": "",
    }  # fmt: skip


def run(command: Sequence[str], **environment: str) -> str:
    ran = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
