"""`zmqengine demo --tools`: a tool loop, in which the model calls functions of this program."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from zmqengine.cli.flags import WorkerTarget
from zmqengine_client import Client, Completion, TextStream, ToolCall

CALLS_MAX = 3
"""The most rounds of calls for one question."""
ASKS = ("What is 417 + 2385?", "Read the file notes.txt.", "How many letters are in river?", "Thank you!")
"""Questions, each a conversation of its own: earlier tool calls confuse the small bundled model."""
_NOTE = "the blue boat"


class DemoFunction(NamedTuple):
    """A function: its definition for the model, and its implementation."""

    definition: dict[str, Any]
    run: Callable[..., object]

    @property
    def name(self) -> str:
        return str(self.definition["function"]["name"])


class Figures(NamedTuple):
    """Totals of the loop."""

    calls: int
    tokens: int
    seconds: float


def run_tools(name: str, max_tokens: int) -> Figures:
    """Ask the worker of this name a few questions, some of which need a function; prints the conversation."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Client(WorkerTarget(name).address, name="demo --tools") as client,
    ):
        (Path(directory) / "notes.txt").write_text(_NOTE + "\n", encoding="utf-8")
        functions = {function.name: function for function in _functions(Path(directory))}
        for function in functions.values():
            definition = function.definition["function"]
            names = ", ".join(definition["parameters"]["properties"])
            show("offered", f"{function.name}({names}): {definition['description']}", "cyan")
        loop = _Loop(client, functions, max_tokens)
        started_s = time.monotonic()
        for ask in ASKS:
            click.echo()
            show("you", ask, "green")
            loop.ask(ask)
        return Figures(loop.calls, loop.tokens, time.monotonic() - started_s)


class _Loop:
    """Conversations, as messages of OpenAI's API."""

    def __init__(self, client: Client, functions: dict[str, DemoFunction], max_tokens: int) -> None:
        self._client = client
        self._functions = functions
        self._max_tokens = max_tokens
        self._messages: list[dict[str, Any]] = []
        self.calls = 0
        self.tokens = 0

    def ask(self, text: str) -> None:
        """Ask, and run the calls of the model until it answers without one."""
        self._messages = [{"role": "user", "content": text}]
        for _ in range(CALLS_MAX):
            answer = self._answer()
            self._messages.append(answer.turn)
            for call in answer.tool_calls:
                result = _run(self._functions, call)
                show(call.name, result, "cyan")
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            self.calls += len(answer.tool_calls)
            if not answer.tool_calls:
                return

    def _answer(self) -> Completion:
        stream: TextStream = self._client.chat(
            self._messages,
            tools=[function.definition for function in self._functions.values()],
            max_tokens=self._max_tokens,
        )
        show("model", "", "yellow", end="")
        for chunk in stream:
            click.echo(chunk.text.replace("\n", " "), nl=False)
        answer = stream.result
        click.echo(", ".join(f"calls {call.name}({_shown(call.arguments)})" for call in answer.tool_calls))
        self.tokens += len(answer.tokens)
        return answer


def _shown(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())


def _functions(directory: Path) -> list[DemoFunction]:
    return [
        DemoFunction(
            _definition("add", "Add two numbers.", {"a": "integer", "b": "integer"}),
            lambda a, b: int(a) + int(b),
        ),
        DemoFunction(
            _definition("read_file", "Read a file.", {"path": "string"}),
            # Only the name of the path: the model may see this directory alone.
            lambda path: (directory / Path(path).name).read_text(encoding="utf-8").strip(),
        ),
        DemoFunction(
            _definition("count_letters", "Count the letters of a word.", {"word": "string"}),
            lambda word: sum(letter.isalpha() for letter in word),
        ),
    ]


def _definition(name: str, description: str, kinds: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _run(functions: dict[str, DemoFunction], call: ToolCall) -> str:
    if call.name not in functions:
        return f"error: there is no {call.name}"
    try:
        return str(functions[call.name].run(**call.arguments))
    except (TypeError, ValueError, OSError) as error:
        return f"error: {error}"


def show(who: str, text: str, color: str, end: str = "\n") -> None:
    """Print a line of a conversation: `who` says `text`."""
    click.echo(click.style(f"{who:>14}  ", fg=color) + text + end, nl=False)
