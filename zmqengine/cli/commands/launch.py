"""`zmqengine launch`: point an agent at a front-end, by its own variables and settings."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import click

from zmqengine.cli.connection import front_end_url
from zmqengine.cli.launch_programs import NO_KEY, PROGRAMS, LaunchTarget, Program, Setup

WAIT_S = 120.0
_CHECKS: Mapping[str, tuple[str, dict[str, object]]] = {
    "messages": (
        "/v1/messages",
        {"max_tokens": 1, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
    ),
    "responses": (
        "/v1/responses",
        {"max_output_tokens": 16, "tools": [{"type": "function", "name": "look"}]},
    ),
    "chat": (
        "/v1/chat/completions",
        {"max_tokens": 1, "tools": [{"type": "function", "function": {"name": "look"}}]},
    ),
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("program", type=click.Choice(list(PROGRAMS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--url", help="Where the front-end is.  [default: that of `zmqengine serve`, else http://127.0.0.1:8000]"
)
@click.option(
    "--model", help="A name from its /v1/models. [default: the first that has tools and is no alias]"
)
@click.option(
    "--api-key", envvar="ZMQENGINE_API_KEY", help="A key, if it asks for one. [env: ZMQENGINE_API_KEY]"
)
@click.option("--run", is_flag=True, help="Start the program instead of printing what it needs.")
@click.option("--anyway", is_flag=True, help="Go on with a context that is too small for the program.")
def launch(
    program: str,
    arguments: tuple[str, ...],
    url: str | None,
    model: str | None,
    api_key: str | None,
    run: bool,
    anyway: bool,
) -> int:
    """Print the environment and settings that point PROGRAM at a front-end, or start it with them (--run).

    A request like the program's own first checks that the front-end answers. ARGUMENTS go to the program.
    """
    entry = PROGRAMS[program]
    http = _Http((url or front_end_url()).rstrip("/"), api_key)
    name, context_tokens = http.choose_model(model, entry)
    folder = Path(click.get_app_dir("zmqengine")) / "launch"
    sees = "vision" in http.capabilities(name)
    front_end = LaunchTarget(http.url, name, context_tokens, str(folder), api_key or NO_KEY, sees=sees)
    if not anyway:
        _check_room(entry, front_end)
    for line in http.complaints(entry, name):
        click.echo(f"zmqengine: {line}", err=True)
    setup = entry.setup(front_end)
    for path, content in setup.files.items():
        _write(Path(path), http.get_text(content) if content.startswith(http.url) else content)
    command = [entry.command, *setup.arguments, *arguments]
    if not run:
        _show(entry, front_end, setup, command)
        return 0
    if shutil.which(entry.command) is None:
        raise click.ClickException(f"there is no {entry.command}; install it with: {entry.install}")
    os.execvpe(entry.command, command, {**os.environ, **setup.environment})


class _Answer(NamedTuple):
    """The text of a response, and the fields of the request that the front-end ignored."""

    text: str
    ignored: list[str]


class _Http:
    """An HTTP client of a front-end. Every failure is one line with advice."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._key = key
        # A local front-end is not reached through a proxy from the environment.
        self._opener = build_opener(ProxyHandler({}))

    def choose_model(self, name: str | None, program: Program) -> tuple[str, int]:
        """The model of this name, or one that suits the program, and its context in tokens.

        Aliases are not chosen; a model with tools and enough context goes before others.
        """
        cards = json.loads(self.get_text(f"{self.url}/v1/models"))["data"]
        by_name = {card["id"]: int(card["max_model_len"]) for card in cards}
        if not by_name:
            raise click.ClickException(
                f"no model is ready at {self.url}: start a worker with `zmqengine worker`, or wait until it has loaded"
            )
        if name is not None and name not in by_name:
            raise click.ClickException(f"there is no model {name!r} at {self.url}, only {', '.join(by_name)}")
        names = [card["id"] for card in cards if card["id"] == card["root"]] or list(by_name)
        chosen = name or min(
            names,
            key=lambda each: (
                program.tools and len(names) > 1 and "tools" not in self.capabilities(each),
                by_name[each] < program.context_tokens_min,
            ),
        )
        return chosen, by_name[chosen]

    def capabilities(self, model: str) -> list[str]:
        """The model's abilities in Ollama's words; none where the front-end does not tell."""
        body = json.dumps({"model": model}).encode()
        try:
            shown = json.loads(self._ask(f"{self.url}/api/show", body).text)
        except HTTPError:
            return []
        return list(shown.get("capabilities", ()))

    def complaints(self, program: Program, model: str) -> list[str]:
        """Complaints of the front-end about a request like the program's own; empty if it answers."""
        path, fields = _CHECKS[program.api]
        if not program.tools:
            fields = {key: value for key, value in fields.items() if key != "tools"}
        said = "input" if program.api == "responses" else "messages"
        body = {"model": model, said: [{"role": "user", "content": "Hello"}], **fields}
        try:
            answer = self._ask(f"{self.url}{path}", json.dumps(body).encode())
        except HTTPError as error:
            raise click.ClickException(f"{self.url}{path} answers {error.code}: {_message(error)}") from None
        if "tools" in answer.ignored:
            return [f"{model} takes no tools, so {program.title} can only talk with it"]
        return []

    def get_text(self, url: str) -> str:
        try:
            return self._ask(url, None).text
        except HTTPError as error:
            raise click.ClickException(f"{url} answers {error.code}: {_message(error)}") from None

    def _ask(self, url: str, body: bytes | None) -> _Answer:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            with self._opener.open(Request(url, body, headers), timeout=WAIT_S) as response:
                ignored = response.headers.get("x-ignored-fields", "").split(", ")
                return _Answer(response.read().decode(), ignored)
        except HTTPError:
            raise
        except (URLError, OSError, ValueError) as error:
            raise click.ClickException(
                f"nothing answers at {self.url} ({error}): start `zmqengine serve` or `zmqengine http`, or give --url"
            ) from None


def _message(error: HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _check_room(program: Program, front_end: LaunchTarget) -> None:
    """Raise for a context that the program's own prompt fills: it would compact its conversation for ever."""
    if front_end.context_tokens < program.context_tokens_min:
        raise click.ClickException(
            f"{front_end.model} has a context of {front_end.context_tokens} tokens, and {program.title} needs "
            f"{program.context_tokens_min} for its own prompt and room to work: serve a model with a longer context, "
            "name another with --model, or try it with --anyway"
        )


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(content, encoding="utf-8")


def _show(program: Program, front_end: LaunchTarget, setup: Setup, command: list[str]) -> None:
    """Print shell lines: comments, exports, and the command as the last comment."""
    click.echo(
        f"# {program.title} with {front_end.model} ({front_end.context_tokens} tokens) at {front_end.url}"
    )
    for path in setup.files:
        click.echo(f"# written: {path}")
    for name, value in setup.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(f"# then: {shlex.join(command)}")
    click.echo(f"# For the prompt cache: {program.advice}")
