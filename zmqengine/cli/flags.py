"""Options shared by several commands."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import click
import msgspec

from zmqengine.sampling_params import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


def _sampling() -> Iterator[tuple[str, type, str]]:
    """Sampling parameters that are a single number: name, type, help."""
    for field in msgspec.structs.fields(Sampling):
        kind, meta = get_args(field.type)
        if kind in (int, float):
            yield field.name.replace("_", "-"), kind, meta.description


_GENERATION: tuple[tuple[str, type, str], ...] = (
    *_sampling(),
    ("thinking-max", int, "The most tokens of reasoning; then the model has to answer."),
    ("seed", int, "The same seed gives the same text."),
    ("adapter", str, "A LoRA adapter of the worker's, by name."),
    ("priority", int, "-100 to 100; the lower is served first."),
    ("deadline-ms", int, "End the answer after this time."),
)


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """The worker a command talks to, and its key files; None to take them from the environment.

    With a `model` it is the worker that the launcher has for it.
    """

    address: str | None = None
    client_key: str | None = None
    server_key: str | None = None
    model: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether an option or the environment names the worker; else it is the default one, or a launcher's."""
        return not (self.address is None and self.model is None and not os.environ.get("ZMQENGINE_ADDRESS"))


def worker_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Add `--worker` and its key options, passed as one `target`."""
    return worker_options_or()(command)


def worker_options_or(*aliases: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """As `worker_options`, with aliases of `--worker`."""

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


def model_option(command: Callable[..., Result]) -> Callable[..., Result]:
    """Add `--model` to a command with `worker_options`, as a part of its `target`."""

    @click.option("-m", "--model", metavar="NAME", help="A model of `zmqengine serve`, loaded if need be.")
    @functools.wraps(command)
    def with_model(*, target: WorkerTarget, model: str | None, **options: Any) -> Result:
        return command(target=dataclasses.replace(target, model=model), **options)

    return with_model


def several_workers_options(command: Command) -> Command:
    """Add a repeatable `--worker` and the keys for all workers: `addresses`, `client_key`, `server_key`."""
    return click.option(
        "-w",
        "--worker",
        "addresses",
        multiple=True,
        metavar="ADDRESS",
        help="A worker's name or address; repeatable.  [default: $ZMQENGINE_ADDRESS or default]",
    )(_key_options(command))


def _key_options(command: Command) -> Command:
    """Add the key files for workers over tcp: `client_key`, `server_key`."""
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
    """Add the options of one generation, passed as keywords; None for options not given."""
    command = click.option("--stop", multiple=True, help="End before this text; may be repeated.")(command)
    for name, kind, text in reversed(_GENERATION):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given: the others have the client library's defaults."""
    return {name: value for name, value in options.items() if value not in (None, ())}
