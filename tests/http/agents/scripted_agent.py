"""A front-end whose model plays the agent: it calls one tool of whatever program asks, and then answers.

    python -m tests.http.agents.scripted_agent --port 18000 --context 400000 --log requests.jsonl

For programs that are too large for the tests; `programs.py` runs them against it. The log holds a line a request: the
prompt's length, how it begins and ends, and what the model said.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

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
# The tool of each program that runs a command, and how it wants it.
SHELLS: dict[str, dict[str, object]] = {
    "Bash": {"command": COMMAND, "description": "Compute"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "run_shell_command": {"command": COMMAND, "description": "Compute", "is_background": False},
    "bash": {"command": COMMAND, "description": "Compute"},
    "shell": {"command": ["bash", "-lc", COMMAND]},
}


def say(prompt: str) -> str:
    """A call to the shell where one is offered and nothing came of it yet; else what came of it."""
    system, _, said = prompt.rpartition("<|user|>")
    results = re.findall(r"<\|tool\|>(.*?)<\|end\|>", prompt, re.DOTALL)
    if results:
        return f"<think>I have seen it.</think>The tool said: {results[-1].strip()[:200]}"
    offered = [name for name in SHELLS if f'"name": "{name}"' in system]
    if not offered or "tool" not in said:
        return "<think>Nothing to do.</think>Hello from the scripted model."
    call = {"name": offered[0], "arguments": SHELLS[offered[0]]}
    return f"<think>I use {offered[0]}.</think>I look.<tool_call>{json.dumps(call)}</tool_call>"


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
