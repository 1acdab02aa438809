"""`zmqengine status`: what a worker is doing."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from zmqengine.cli.advice import EXIT_FAILED
from zmqengine.cli.connection import connect
from zmqengine.cli.options import Target, worker_options
from zmqengine.protocol.messages import Description, Status


@click.command()
@worker_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.option("--ready", is_flag=True, help="Exit code 1 unless the model is loaded and requests are taken.")
@click.option("--timeout", "timeout_s", type=float, default=5.0, show_default=True, metavar="SECONDS")
def status(target: Target, as_json: bool, ready: bool, timeout_s: float) -> int:
    """Show state, model and load of a worker. Exit code 1 if none answers."""
    with connect(target, name="status", connect_timeout_s=timeout_s, answer_timeout_s=timeout_s) as client:
        description, now = client.describe(), client.status()
    if as_json:
        whole = {"description": _plain(description), "status": _plain(now)}
        click.echo(json.dumps(whole, indent=2))
    else:
        click.echo("\n".join(_lines(description, now)))
    return EXIT_FAILED if ready and now.state != "ready" else 0


def _plain(message: Description | Status) -> Any:
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    plain.pop("call")
    return plain | {"epoch": message.epoch.hex()}


def _lines(description: Description, now: Status) -> list[str]:
    progress = description.progress
    state: str = now.state
    if now.state in ("loading", "warming"):
        done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        state = f"{state}: {progress.stage}{done}"
    rows = [
        ("worker", f"{description.name}, process {description.pid}, version {description.version}"),
        ("state", f"{state} {description.message}".strip()),
        ("up", _duration(now.uptime_s)),
    ]
    if description.model is not None:
        model = description.model
        rows.append(
            ("model", f"{model.name}, {model.context_tokens} tokens of context, {model.vocab_size} words")
        )
    rows += sorted((name, fact) for name, fact in now.facts.items() if name != "model")
    rows += [(name, _number(number)) for name, number in sorted(now.numbers.items())]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.3f}".rstrip("0").rstrip(".")


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
