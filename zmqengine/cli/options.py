"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_GENERATION: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0: always the most probable token; higher: more variety."),
    ("top-p", float, "Keep the smallest set of tokens with this probability."),
    ("top-k", int, "Keep this many of the most probable tokens."),
    ("min-p", float, "Keep tokens of at least this share of the highest probability."),
    ("repetition-penalty", float, "Over 1: against repeating the prompt and itself."),
    ("presence-penalty", float, "Against tokens that were used."),
    ("frequency-penalty", float, "Against tokens, by how often they were used."),
    ("seed", int, "The same seed gives the same text."),
    ("priority", int, "-100 to 100; the lower is served first."),
    ("deadline-ms", int, "End the answer after this time."),
)


def worker_option(command: Command) -> Command:
    """`--worker`, passed on as `address`."""
    return click.option(
        "-w",
        "--worker",
        "address",
        metavar="ADDRESS",
        help="Which worker: its name, ipc://... or tcp://HOST:PORT.  [default: $ZMQENGINE_ADDRESS or default]",
    )(command)


def generation_options(command: Command) -> Command:
    """The options of one generation, passed on as keywords; None for what was not given."""
    command = click.option("--stop", multiple=True, help="End before this text; may be repeated.")(command)
    for name, kind, text in reversed(_GENERATION):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that were not given: their default is the client library's."""
    return {name: value for name, value in options.items() if value not in (None, ())}
