"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import click
import msgspec

from zmqengine.sampling_params import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


def _sampling() -> Iterator[tuple[str, type, str]]:
    """The parameters that are one number."""
    for field in msgspec.structs.fields(Sampling):
        kind, meta = get_args(field.type)
        if kind in (int, float):
            yield field.name.replace("_", "-"), kind, meta.description


_GENERATION: tuple[tuple[str, type, str], ...] = (
    *_sampling(),
    ("seed", int, "The same seed gives the same text."),
    ("priority", int, "-100 to 100; the lower is served first."),
    ("deadline-ms", int, "End the answer after this time."),
)


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """Which worker a command talks to, and the key files to do it with; None is for the environment to say."""

    address: str | None = None
    client_key: str | None = None
    server_key: str | None = None


def worker_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """`--worker` and the keys for it, passed on as one `target`."""
    return worker_options_or()(command)


def worker_options_or(*aliases: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """The same, with other names for `--worker`."""

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        @click.option(
            "-w",
            "--worker",
            *aliases,
            "address",
            metavar="ADDRESS",
            help="Which worker: its name, ipc://... or tcp://HOST:PORT.  [default: $ZMQENGINE_ADDRESS or default]",
        )
        @_key_options
        @functools.wraps(command)
        def with_target(
            *, address: str | None, client_key: str | None, server_key: str | None, **options: Any
        ) -> Result:
            return command(target=WorkerTarget(address, client_key, server_key), **options)

        return with_target

    return decorate


def several_workers_options(command: Command) -> Command:
    """`--worker`, repeatable, and the keys for all of them: `addresses`, `client_key`, `server_key`."""
    return click.option(
        "-w",
        "--worker",
        "addresses",
        multiple=True,
        metavar="ADDRESS",
        help="A worker's name or address; repeatable.  [default: $ZMQENGINE_ADDRESS or default]",
    )(_key_options(command))


def _key_options(command: Command) -> Command:
    """The key files that a worker over tcp wants: `client_key`, `server_key`."""
    for option in (
        click.option(
            "--server-key", metavar="FILE", help="The worker's public key.  [default: $ZMQENGINE_SERVER_KEY]"
        ),
        click.option(
            "--client-key", metavar="FILE", help="Your secret key.  [default: $ZMQENGINE_CLIENT_KEY]"
        ),
    ):
        command = option(command)
    return command


def generation_options(command: Command) -> Command:
    """The options of one generation, passed on as keywords; None for what was not given."""
    command = click.option("--stop", multiple=True, help="End before this text; may be repeated.")(command)
    for name, kind, text in reversed(_GENERATION):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that were not given: their default is the client library's."""
    return {name: value for name, value in options.items() if value not in (None, ())}
