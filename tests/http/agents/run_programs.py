"""Agents as their users start them: `zmqengine launch PROGRAM --run` for each that is installed, and a table.

    python -m tests.http.agents.run_programs --bin ~/agents/node_modules/.bin [--real] [PROGRAM ...]

Each program is asked to use a tool, of a front-end whose model is scripted: the tool really runs, in an empty folder
and an empty home. With --real a second front-end has a real worker, pico-tools with a context of 262,144 tokens: the
program asks twice, with its own way to go on, and the table says how much of the second prompt came from the cache.
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

from tests.http.agents.scripted_agent import FACTS, TEMPLATE, say
from tests.http.scripted import ScriptedClient
from tests.http.serving import serving
from tests.support.workers import WorkerProcess
from zmqengine.cli.launch_programs import PROGRAMS
from zmqengine.pico import model_path
from zmqengine_http import HttpConfig

ROOT = Path(__file__).parents[3]
SCRIPTED_S = 600
REAL_S = 1200
"""Prompts of 20,000 tokens take minutes on a CPU, and to start a program takes one where it is busy."""
CONTEXT = 262_144


class Usage(NamedTuple):
    """The arguments for a first turn, and for a second in the same session."""

    first: Sequence[str]
    second: Sequence[str] = ()


ASK = "use a tool"
USAGES = {
    "claude": Usage(
        ["-p", ASK, "--allowedTools", "Bash"], ["-c", "-p", "and once more", "--allowedTools", "Bash"]
    ),
    "codex": Usage(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK],
        [
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "resume",
            "--last",
            "more",
        ],
    ),
    "opencode": Usage(["run", ASK], ["run", "-c", "and once more"]),
    "qwen-code": Usage(["-y", "-p", ASK], ["-y", "-c", "-p", "and once more"]),
    "pi": Usage(["-p", ASK], ["-c", "-p", "and once more"]),
    "copilot": Usage(
        ["-p", ASK, "--allow-all-tools"], ["--continue", "-p", "and once more", "--allow-all-tools"]
    ),
    "aider": Usage(
        [
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--no-show-model-warnings",
            "--no-stream",
            "--message",
            ASK,
        ]
    ),
    "continue": Usage(["-p", ASK, "--auto"], ["--resume", "-p", "and once more", "--auto"]),
    "crush": Usage(["run", ASK]),
    "goose": Usage(["run", "-t", ASK]),
    "llm": Usage([ASK], ["-c", "and once more"]),
}


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
        }  # fmt: skip

    def launch(
        self, program: str, url: str, arguments: Sequence[str], wait_s: float
    ) -> tuple[int | None, str]:
        """Run the program to its end; its exit code, None if it had to be ended, and its output."""
        command = [sys.executable, "-m", "zmqengine.cli.main", "launch", program, "--url", url, "--run", "--"]
        process = subprocess.Popen(
            [*command, *arguments], cwd=self.folder, env=self._environment, text=True, errors="replace",
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
        """Delete both."""
        shutil.rmtree(self._top, ignore_errors=True)


def try_scripted(program: str, path: str, *, verbose: bool) -> dict[str, object]:
    """A tool turn against the scripted model."""
    client = ScriptedClient(say, template=TEMPLATE, facts=FACTS, context_tokens=400_000, chunk_tokens=8)
    place = Place(path)
    config = HttpConfig(aliases={"claude-*": "scripted"})
    with serving(config, lambda *_: client) as front, recorded() as requests:  # type: ignore[arg-type, return-value]
        code, output = place.launch(program, front.url, USAGES[program].first, SCRIPTED_S)
    answer = place.folder / "answer.txt"
    ran = answer.exists() and answer.read_text().strip() == "42"
    place.remove()
    if verbose:
        click.echo(output[-3000:], err=True)
    ended = "no end" if code is None else f"rc {code}"
    talked = "talks" if requests.generations and code == 0 else f"FAILED ({ended})"
    return {
        "tool": "ran" if ran and code == 0 else talked,
        "requests": len(requests.generations),
        "refused": ", ".join(requests.refusals) or "-",
        "ignored": ", ".join(requests.ignored) or "-",
    }


def try_real(program: str, path: str, worker: WorkerProcess, *, verbose: bool) -> dict[str, object]:
    """Two turns against the real worker; the figures are those of the second turn's longest prompt."""
    usage = USAGES[program]
    if not usage.second:
        return {"second prompt": "-", "cached": "-"}
    place = Place(path)
    with (
        serving(HttpConfig(workers=(worker.address,), aliases={"claude-*": "pico-tools"})) as front,
        recorded() as requests,
    ):
        code, output = place.launch(program, front.url, usage.first, REAL_S)
        if code is None:
            # The cache would hold the part of its prompt that was read before the end.
            place.remove()
            return {"second prompt": "no end of the first turn", "cached": "-"}
        before = len(requests.generations)
        _, more = place.launch(program, front.url, usage.second, REAL_S)
        time.sleep(1)
    place.remove()
    if verbose:
        click.echo(output[-2000:] + more[-2000:], err=True)
    turns = requests.generations[before:]
    if not turns:
        return {"second prompt": "none", "cached": "-"}
    longest = max(turns, key=lambda line: line["prompt_tokens"])
    return {"second prompt": longest["prompt_tokens"], "cached": longest["cached_tokens"]}


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
    return next((word.strip("(),v") for word in words if word[:1].isdigit() or word[:2] == "v1"), "?")


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
            command = shutil.which(PROGRAMS[program].command, path=path)
            if command is None:
                rows.append({"program": program, "version": "not installed"})
                continue
            row: dict[str, object] = {"program": program, "version": version_of(command, path)}
            row |= try_scripted(program, path, verbose=verbose)
            if worker is not None:
                row |= try_real(program, path, worker, verbose=verbose)
            rows.append(row)
            click.echo(f"{program}: {row}", err=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    click.echo("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        click.echo("| " + " | ".join(str(row.get(name, "")) for name in columns) + " |")
    if any(str(row.get("tool", "")).startswith("FAILED") for row in rows):
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
