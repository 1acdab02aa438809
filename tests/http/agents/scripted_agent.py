"""A front-end whose model plays the agent: it calls one tool of whatever program asks, and then answers.

    python -m tests.http.agents.scripted_agent --port 18000 --context 400000 --log requests.jsonl

For programs that are too large for the tests; `run_programs.py` runs them against it. Asked to "use a tool" it calls a
shell, asked to "look at the picture FILE" what shows one, asked to "find a deferred tool" Claude Code's search. The log
holds a line a request: the prompt's length, how it begins and ends, and what the model said.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import uvicorn

from tests.http.scripted import ScriptedClient
from zmqengine.errors import Overloaded
from zmqengine_http import HttpApp, HttpConfig
from zmqengine_http.serving import logs

TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}<|assistant|>"
)
FACTS: dict[str, str | bool | int] = {
    "tool_parser": "json_tools",
    "think_start": "<think>",
    "think_end": "</think>",
}
COMMAND = "echo $((20 + 22)) > answer.txt; cat answer.txt"
SHELLS: tuple[str, ...] = (
    "Bash",
    "exec_command",
    "shell_command",
    "run_shell_command",
    "bash",
    "shell",
    "developer__shell",
    "run_commands",
)
VIEWERS: tuple[str, ...] = ("view_image", "Read", "read", "read_file", "read_files", "view")
SEARCHES: tuple[str, ...] = ("ToolSearch",)
FOUND = "WebFetch"
"""A tool that Claude Code defers."""


def say(prompt: str) -> str:
    """A call to the tool that was asked for where it is offered and nothing came of it yet; else what came of it."""
    results = re.findall(r"<\|tool\|>(.*?)<\|end\|>", prompt, re.DOTALL)
    if results:
        return f"<think>I have seen it.</think>The tool said: {results[-1].strip()[:200]}"
    call = _call(prompt.partition("<|end|>\n")[2], _offered(prompt))
    if call is None:
        return "<think>Nothing to do.</think>Hello from the scripted model."
    return f"<think>I use {call['name']}.</think>I look.<tool_call>{json.dumps(call)}</tool_call>"


def _offered(prompt: str) -> dict[str, dict[str, Any]]:
    """The properties of the offered tools, by their names."""
    shown = re.search(r"<\|tools\|>(.*?)<\|end\|>\n", prompt, re.DOTALL)
    functions = [tool["function"] for tool in json.loads(shown[1])] if shown else []
    return {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}


def _call(conversation: str, offered: dict[str, dict[str, Any]]) -> dict[str, object] | None:
    """A call of the first offered tool for the task, with each argument that its schema names.

    A program may add messages of its own behind the question.
    """
    picture = re.search(r"look at the picture (\S+\.png)", conversation)
    if "find a deferred tool" in conversation:
        names, text = SEARCHES, f"select:{FOUND}"
    elif picture:
        names, text = VIEWERS, picture[1]
    elif "tool" in conversation.rpartition("<|user|>")[2]:
        names, text = SHELLS, COMMAND
    else:
        return None
    name = next((name for name in names if name in offered), None)
    if name is None:
        return None
    values: dict[str, object] = {
        **dict.fromkeys(("command", "cmd", "file_path", "filePath", "filepath", "path", "query"), text),
        "commands": [text], "files": [{"path": text}], "description": "Compute", "is_background": False,
    }  # fmt: skip
    # A tool without a schema takes what it is given.
    known = offered[name] or {"command": {}}
    return {"name": name, "arguments": {key: value for key, value in values.items() if key in known}}


class Agent:
    """The model, with a log and with faults: it is `busy` for that many requests first."""

    def __init__(self, log: Path | None, busy: int) -> None:
        self._log = log
        self._busy = busy

    def say(self, prompt: str) -> str:
        if self._busy > 0:
            self._busy -= 1
            self._write(prompt, "busy")
            raise Overloaded("the queue is full", retry_after_ms=300)
        said = say(prompt)
        self._write(prompt, said)
        return said

    def _write(self, prompt: str, said: str) -> None:
        if self._log is not None:
            line = {"chars": len(prompt), "head": prompt[:60], "tail": prompt[-200:], "said": said}
            with self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")


@click.command()
@click.option("--port", type=int, default=18000)
@click.option("--context", type=int, default=400_000, help="Tokens, each a byte.")
@click.option("--busy", type=int, default=0, help="Refuse this many requests first.")
@click.option("--log", type=click.Path(path_type=Path))
def main(port: int, context: int, busy: int, log: Path | None) -> None:
    """Serve until ended."""
    agent = Agent(log, busy)
    client = ScriptedClient(agent.say, template=TEMPLATE, facts=FACTS, context_tokens=context, chunk_tokens=8)
    config = HttpConfig(aliases={"claude-haiku-4-5-20251001": "scripted", "claude-sonnet-4-6": "scripted"})
    logs.configure(config)
    app = HttpApp(config, lambda *_: client)  # type: ignore[arg-type, return-value]
    uvicorn.run(app, port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    sys.exit(main())
