"""Tools that people point at a base URL: langchain-openai in this process, and the command-line tool `llm`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from tests.http.front import Front, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.process


def say(prompt: str) -> str:
    """A model that adds when it has a tool, and otherwise says what it was asked."""
    if "tool: 3" in prompt:
        return "It is 3."
    if "tools:" in prompt:
        return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    return "You said: " + prompt.rsplit("user: ", 1)[1].split("\n")[0]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    scripted = ScriptedClient(say, facts={"tool_parser": "json_tools"})
    with serving(HttpConfig(), lambda *_: scripted) as front:  # type: ignore[arg-type]
        yield front


@pytest.fixture
def langchain(front: Front) -> ChatOpenAI:
    pytest.importorskip("langchain_openai")
    # It takes seconds, and of the processes of a run only this one needs it.
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=front.url + "/v1", api_key=SecretStr("none"), model="scripted", timeout=60, max_retries=0
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_langchain_asks_and_streams(langchain: ChatOpenAI) -> None:
    """Text and usage arrive, in one piece and in many."""
    from langchain_core.messages import AIMessage

    answer = langchain.invoke("Hello")
    assert answer.content == "You said: Hello"
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == len("You said: Hello") + 1
    chunks = list(langchain.stream("Hello"))
    assert len(chunks) > 5
    assert "".join(str(chunk.content) for chunk in chunks) == "You said: Hello"


def test_langchain_calls_a_tool_and_brings_the_result_back(langchain: ChatOpenAI) -> None:
    """The call comes parsed, and its own message goes back as langchain writes it."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    with_tools = langchain.bind_tools([add])
    question = HumanMessage("1 + 2?")
    answer = with_tools.invoke([question])
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    result = ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
    assert with_tools.invoke([question, answer, result]).content == "It is 3."


@pytest.mark.parametrize("streamed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_llm_prints_an_answer(front: Front, tmp_path: Path, streamed: bool) -> None:
    """The command-line tool with an extra model, as its manual says."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: scripted\n  api_base: {front.url}/v1\n  api_key_name: none\n"
    )
    command = [sys.executable, "-m", "llm", "-m", "ours", "--key", "none", "-n", "Hello there"]
    ran = subprocess.run(
        command if streamed else [*command, "--no-stream"],
        env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "You said: Hello there"
