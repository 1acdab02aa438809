"""Agents as their users start them: `zmqengine launch PROGRAM --run` for each that is installed, and a table.

    python -m tests.http.agents.run_programs --bin ~/agents/node_modules/.bin [--real] [PROGRAM ...]

Each program is asked to use a tool, of a front-end whose model is scripted: the tool really runs, in an empty folder
and an empty home. In a second session it is asked to look at a picture, and then goes on: a message that the model
cannot read must not end a session. With --real a second front-end has a real worker, pico-tools with a context of
262,144 tokens: the program asks twice, with its own way to go on, and the table says how much of the second prompt came
from the cache. The prompts of Claude Code's tool search, which pico-tools cannot be made to call, are replayed there.
The counts of requests include the one with which `launch` tries the front-end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import openai
import psutil

from tests.http.agents.scripted_agent import FACTS, FOUND, TEMPLATE, say
from tests.http.front import serving
from tests.http.scripted import ScriptedClient
from tests.support.workers import WorkerProcess
from zmqengine.cli.launch_programs import PROGRAMS
from zmqengine.pico import model_path
from zmqengine_http import HttpConfig

ROOT = Path(__file__).parents[3]
SCRIPTED_S = 600
REAL_S = 1200
"""Prompts of 20,000 tokens take minutes on a CPU, and to start a program takes one where it is busy."""
CONTEXT = 262_144


ASK = "use a tool"
MORE = "and once more"
PICTURE = ROOT / "docs/pictures/shapes.png"


class Usage(NamedTuple):
    """The arguments for a first turn, and for a second in the same session; {} is the question."""

    first: Sequence[str]
    second: Sequence[str] = ()
    launched: bool = True
    """Started by `zmqengine launch`, and not by its own variables."""


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = ("-p", "{}", "--allowedTools", "Bash", "Read", "ToolSearch")
_AIDER = ("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-stream")
USAGES = {
    "claude": Usage(_CLAUDE, ("-c", *_CLAUDE)),
    "codex": Usage((*_CODEX, "{}"), (*_CODEX, "resume", "--last", "{}")),
    "opencode": Usage(("run", "{}"), ("run", "-c", "{}")),
    "qwen-code": Usage(("-y", "-p", "{}"), ("-y", "-c", "-p", "{}")),
    "pi": Usage(("-p", "{}"), ("-c", "-p", "{}")),
    "copilot": Usage(
        ("-p", "{}", "--allow-all-tools", "--allow-all-paths"),
        ("--continue", "-p", "{}", "--allow-all-tools", "--allow-all-paths"),
    ),
    # It goes on with a session on a terminal alone.
    "cline": Usage(("{}",)),
    "continue": Usage(("-p", "{}", "--auto"), ("--resume", "-p", "{}", "--auto")),
    "crush": Usage(("run", "{}")),
    "goose": Usage(("run", "-n", "one", "-t", "{}"), ("run", "-n", "one", "-r", "-t", "{}")),
    "aider": Usage((*_AIDER, "--message", "{}")),
    "mini-swe-agent": Usage(
        ("--yolo", "--exit-immediately", "-m", "openai/scripted", "-t", "{}"), launched=False
    ),
    "llm": Usage(("{}",), ("-c", "{}")),
}
COMMANDS = {name: PROGRAMS[name].command if usage.launched else "mini" for name, usage in USAGES.items()}


class Requests(logging.Handler):
    """The log lines of a front-end's requests."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "request":
            self.lines.append(record.__dict__["fields"])

    @property
    def generations(self) -> list[dict[str, Any]]:
        """The requests that were answered by the model."""
        return [line for line in self.lines if "prompt_tokens" in line]

    @property
    def refusals(self) -> list[str]:
        """Refused requests, each kind once."""
        refused = {f"{line['status']} {line['path']}" for line in self.lines if line["status"] >= 400}
        return sorted(refused)

    @property
    def ignored(self) -> list[str]:
        """Fields that had no effect."""
        return sorted({name for line in self.lines for name in line.get("ignored_fields", ())})


@contextlib.contextmanager
def recorded() -> Iterator[Requests]:
    """The requests of the front-ends of this process."""
    logger = logging.getLogger("zmqengine.http")
    requests = Requests()
    logger.addHandler(requests)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield requests
    finally:
        logger.removeHandler(requests)


class Place:
    """An empty home and an empty folder, and the program in them."""

    def __init__(self, path: str) -> None:
        self._top = Path(tempfile.mkdtemp(prefix="agents-"))
        self.home, self.folder = self._top / "home", self._top / "folder"
        self.home.mkdir()
        self.folder.mkdir()
        self._environment = {
            "HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config"), "PATH": path, "TERM": "dumb",
            "LANG": "C.UTF-8", "NO_COLOR": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}",
            # Everything but the front-end is out of reach; programs that ask the network must do without.
            "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost",
            # mini-swe-agent would ask for its settings first.
            "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        }  # fmt: skip

    def start(
        self, program: str, url: str, arguments: Sequence[str], question: str, wait_s: float
    ) -> tuple[int | None, str]:
        """Ask the program to its end; its exit code, None if it had to be ended, and its output."""
        command = [sys.executable, "-m", "zmqengine.cli.main", "launch", program, "--url", url, "--run", "--"]
        if not USAGES[program].launched:
            command = [COMMANDS[program]]
        filled = [part.replace("{}", question) for part in arguments]
        environment = {**self._environment, "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
        process = subprocess.Popen(
            [*command, *filled], cwd=self.folder, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output

    def remove(self) -> None:
        """End what the program left running, and delete both folders."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.home):
                    process.kill()
        shutil.rmtree(self._top, ignore_errors=True)


@contextlib.contextmanager
def place_of(path: str) -> Iterator[Place]:
    """A place that is removed at the end."""
    place = Place(path)
    try:
        yield place
    finally:
        place.remove()


def try_scripted(
    program: str, path: str, worker: WorkerProcess | None, *, verbose: bool
) -> dict[str, object]:
    """A tool turn against the scripted model; in sessions of their own a picture, and a search for tools."""
    client = ScriptedClient(say, template=TEMPLATE, facts=FACTS, context_tokens=400_000, chunk_tokens=8)
    config = HttpConfig(aliases={"claude-*": "scripted"}, log_prompts=True)
    usage = USAGES[program]
    row: dict[str, object] = {}
    with serving(config, lambda *_: client) as front, recorded() as requests:  # type: ignore[arg-type, return-value]
        with place_of(path) as place:
            code, output = place.start(program, front.url, usage.first, ASK, SCRIPTED_S)
            answer = place.folder / "answer.txt"
            ran = answer.exists() and answer.read_text().strip() == "42"
        ended = "no end" if code is None else f"rc {code}"
        talked = "talks" if requests.generations and code == 0 else f"FAILED ({ended})"
        row["tool"] = "ran" if ran and code == 0 else talked
        row["requests"] = len(requests.generations)
        if program not in ("aider", "mini-swe-agent", "llm"):
            with place_of(path) as place:
                picture = shutil.copy(PICTURE, place.folder)
                question = f"look at the picture {picture}"
                seen = len(client.prompts)
                first, more = place.start(program, front.url, usage.first, question, SCRIPTED_S)
                output += more
                second: int | None = 0
                if usage.second:
                    second, again = place.start(program, front.url, usage.second, MORE, SCRIPTED_S)
                    output += again
                row["picture"] = _went_on(client.prompts[seen:], first, second)
        if program == "claude" and worker is not None:
            with place_of(path) as place:
                seen = len(client.prompts)
                place.start(program, front.url, usage.first, "find a deferred tool", SCRIPTED_S)
            row["tool search"] = _searched(client.prompts[seen:], worker)
    if verbose:
        click.echo(output[-3000:], err=True)
    row["refused"] = ", ".join(requests.refusals) or "-"
    row["ignored"] = ", ".join(requests.ignored) or "-"
    return row


def _went_on(prompts: Sequence[str], first: int | None, second: int | None) -> str:
    """The end of a session in which the model looked at a picture, and what it was told."""
    if (first, second) != (0, 0):
        return f"FAILED (rc {first}, then {second})"
    if any(PLACEHOLDER in prompt for prompt in prompts):
        return "goes on, told by us"
    return "goes on, told by it" if any("<|tool|>" in prompt for prompt in prompts) else "cannot look"


PLACEHOLDER = "which this model cannot see"


def _searched(prompts: Sequence[str], worker: WorkerProcess) -> str:
    """Tokens of the prompt after a search for a tool, computed and new, when a real worker reads the session."""
    turns = [prompt for prompt in prompts if "<|tools|>" in prompt and FOUND in prompt]
    results = [place for place, prompt in enumerate(turns) if "<|tool|>" in prompt]
    if not results or results[0] == 0:
        return "FAILED (no search)"
    with (
        serving(HttpConfig(workers=(worker.address,))) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0, timeout=REAL_S) as client,
    ):
        before, after = (
            client.completions.create(model="pico-tools", prompt=prompt, max_tokens=1).usage
            for prompt in turns[results[0] - 1 : results[0] + 1]
        )
    assert before is not None
    assert after is not None
    assert after.prompt_tokens_details is not None
    computed = after.prompt_tokens - (after.prompt_tokens_details.cached_tokens or 0)
    new = after.prompt_tokens - before.prompt_tokens
    return f"{computed} of {after.prompt_tokens} computed, {new} new"


def try_real(program: str, path: str, worker: WorkerProcess, *, verbose: bool) -> dict[str, object]:
    """Two turns against the real worker; the figures are those of the second turn's longest prompt."""
    usage = USAGES[program]
    if not usage.second:
        return {"second prompt": "-", "cached": "-"}
    with (
        place_of(path) as place,
        serving(HttpConfig(workers=(worker.address,), aliases={"claude-*": "pico-tools"})) as front,
        recorded() as requests,
    ):
        code, output = place.start(program, front.url, usage.first, ASK, REAL_S)
        if code is None:
            # The cache would hold the part of its prompt that was read before the end.
            return {"second prompt": "no end of the first turn", "cached": "-"}
        before = len(requests.generations)
        _, more = place.start(program, front.url, usage.second, MORE, REAL_S)
        time.sleep(1)
    if verbose:
        click.echo(output[-2000:] + more[-2000:], err=True)
    turns = requests.generations[before:]
    if not turns:
        return {"second prompt": "none", "cached": "-"}
    longest = max(turns, key=lambda line: line["prompt_tokens"])
    refused = {"refused by the worker": ", ".join(requests.refusals)} if requests.refusals else {}
    return {"second prompt": longest["prompt_tokens"], "cached": longest["cached_tokens"], **refused}


def version_of(command: str, path: str) -> str:
    """The version that a program says it has."""
    ran = subprocess.run(
        [command, "--version"],
        capture_output=True,
        text=True,
        timeout=SCRIPTED_S,
        check=False,
        env={**os.environ, "PATH": path},
    )
    words = (ran.stdout or ran.stderr).split()
    return next((word.strip("(),.v") for word in words if word[:1].isdigit() or word[:2] == "v1"), "?")


@click.command()
@click.argument("programs", nargs=-1, type=click.Choice(list(USAGES)))
@click.option("--bin", "folders", multiple=True, help="A folder of programs; repeatable.")
@click.option("--real", is_flag=True, help="Two turns on a real worker as well.")
@click.option("--verbose", is_flag=True, help="Show the end of each program's output.")
def main(programs: tuple[str, ...], folders: tuple[str, ...], real: bool, verbose: bool) -> None:
    """Print a table of the programs that are installed."""
    path = os.pathsep.join([*(str(Path(folder).resolve()) for folder in folders), os.environ["PATH"]])
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(_long_pico(stack)) if real else None
        for program in programs or USAGES:
            command = shutil.which(COMMANDS[program], path=path)
            if command is None:
                rows.append({"program": program, "version": "not installed"})
                continue
            row: dict[str, object] = {"program": program, "version": version_of(command, path)}
            row |= try_scripted(program, path, worker, verbose=verbose)
            if worker is not None:
                row |= try_real(program, path, worker, verbose=verbose)
            rows.append(row)
            click.echo(f"{program}: {row}", err=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    click.echo("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        click.echo("| " + " | ".join(str(row.get(name, "")) for name in columns) + " |")
    if any(str(value).startswith("FAILED") for row in rows for value in row.values()):
        sys.exit(1)


def _long_pico(stack: contextlib.ExitStack) -> WorkerProcess:
    """A worker of pico-tools with a context that holds an agent's prompt."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pico-tools"
    shutil.copytree(model_path("pico-tools"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return WorkerProcess(None, model=str(folder), supervise=False)


if __name__ == "__main__":
    main()
