"""`zmqengine status`: state and load of a worker."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from zmqengine.cli.advice import EXIT_FAILED
from zmqengine.cli.columns import columns
from zmqengine.cli.connection import connect, launched_models
from zmqengine.cli.flags import WorkerTarget, worker_options
from zmqengine.cli.quantities import Seconds, count, duration, memory_line, shown
from zmqengine.protocol.addresses import is_absent, resolve
from zmqengine.protocol.launcher import ModelEntry, ModelList
from zmqengine.protocol.messages import Description, SessionInfo, Status
from zmqengine_client import Client

ANSWER_S = 5.0
RATE_S = 0.5
"""Seconds over which the token rate is measured, if requests are running."""
PROGRESS_MIN_S = 15.0
"""An idle worker makes a pass every 10 s."""
WAITS = {
    "row": "for a row",
    "memory": "for memory",
    "turn": "for others to go first",
    "preparation": "to be made ready",
    "recovery": "for a failed batch to be put back",
}


@click.command()
@worker_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.option("--all", "whole", is_flag=True, help="Every number and fact as well.")
@click.option("--ready", is_flag=True, help="Exit code 1 unless the model is loaded and requests are taken.")
@click.option(
    "--progress",
    "progress_s",
    type=Seconds(PROGRESS_MIN_S),
    metavar="SECONDS",
    help="Exit code 1 if the worker's loop has made no pass for this long; at least 15.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.1),
    metavar="SECONDS",
    help="Wait so long for an answer.  [default: 5; no time for a worker without a socket file]",
)
def status(
    target: WorkerTarget,
    as_json: bool,
    whole: bool,
    ready: bool,
    progress_s: float | None,
    timeout_s: float | None,
) -> int:
    """Show state, model and load of a worker, or of all models of a launcher. Exit code 1 if none answers."""
    if not target.is_named:
        listed = launched_models()
        if listed is not None:
            if whole or ready or progress_s is not None:
                raise click.UsageError(
                    "--all, --ready and --progress are about one worker, and a launcher runs: give its --worker, "
                    "an address that `zmqengine status --json` lists"
                )
            click.echo(
                json.dumps(_listed(listed), indent=2) if as_json else "\n".join(launcher_lines(listed))
            )
            return 0
    waits: dict[str, float] = {"answer_timeout_s": timeout_s or ANSWER_S}
    if timeout_s is not None or not is_absent(resolve(target.address)):
        waits["connect_timeout_s"] = waits["answer_timeout_s"]
    with connect(target, name="status", **waits) as client:
        description, now = client.describe(), client.status()
        if as_json:
            both = {"description": _plain(description), "status": _plain(now)}
            click.echo(json.dumps(both, indent=2))
        else:
            asked_by_a_probe = ready or progress_s is not None
            rate = None if asked_by_a_probe or not now.numbers.get("running") else _tokens_per_s(client, now)
            click.echo("\n".join(_lines(description, now, rate)))
            if whole:
                click.echo("\n" + "\n".join(_everything(now)))
    stuck = progress_s is not None and is_stuck(now, progress_s)
    return EXIT_FAILED if stuck or (ready and now.state != "ready") else 0


def _listed(listed: ModelList) -> Any:
    plain = msgspec.to_builtins(listed, builtin_types=(bytes,))
    plain.pop("call")
    return plain | {"epoch": listed.epoch.hex(), "models": [_entry(entry) for entry in listed.models]}


def _entry(entry: ModelEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def launcher_lines(listed: ModelList) -> list[str]:
    """The state of every model of a launcher, and the memory, for people."""
    loaded = [f"{shown(listed.reserved_bytes)} of {shown(listed.budget_bytes)} for models"]
    if listed.foreign_bytes:
        loaded.append(f"{shown(listed.foreign_bytes)} taken by other workers")
    rows = [("model", "state", "memory", "requests", "")]
    rows += [
        (entry.name, _model_state(entry), _model_memory(entry), _model_requests(entry), _model_note(entry))
        for entry in listed.models
    ]
    head = ["http      " + listed.http] if listed.http else []
    return [*head, "memory    " + ", ".join(loaded), "", *columns(rows)]


def _model_memory(entry: ModelEntry) -> str:
    return "" if entry.never else shown(entry.need_bytes)


def _model_state(entry: ModelEntry) -> str:
    if entry.never:
        return "not loadable"
    done = "" if entry.fraction is None else f" {entry.fraction:.0%}"
    return f"{entry.state}{done}"


def _model_requests(entry: ModelEntry) -> str:
    parts = [
        f"{number} {word}"
        for number, word in ((entry.requests, "running"), (entry.waiting, "waiting"))
        if number
    ]
    return ", ".join(parts) or ("" if entry.never else "none")


def _model_note(entry: ModelEntry) -> str:
    if entry.never or entry.state == "failed":
        return entry.never or entry.message
    parts = [f"adapters {', '.join(entry.adapters)}"] if entry.adapters else []
    if entry.pin:
        parts.append("pinned")
    elif entry.expires_s is not None:
        parts.append(f"unloaded in {duration(max(0.0, entry.expires_s))} if idle")
    return "; ".join(parts)


def is_stuck(now: Status, progress_s: float) -> bool:
    """Whether the loop of a worker with a loaded model has made no pass for this long.

    Its reported requests do not count: the hanging step may be the first of its batch.
    """
    return now.state in ("ready", "draining") and now.pass_age_ms > progress_s * 1000


def _plain(message: Description | Status) -> Any:
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    plain.pop("call")
    return plain | {"epoch": message.epoch.hex()}


def _tokens_per_s(client: Client, before: Status) -> float | None:
    time.sleep(RATE_S)
    after = client.status()
    passed_s = after.uptime_s - before.uptime_s
    if after.epoch != before.epoch or passed_s <= 0:
        return None
    tokens = after.numbers.get("generated_tokens", 0) - before.numbers.get("generated_tokens", 0)
    return tokens / passed_s


def _lines(description: Description, now: Status, rate: float | None) -> list[str]:
    rows = [
        ("worker", f"{description.name}, process {description.pid}, version {description.version}"),
        ("state", f"{_state(description, now)}, up {duration(now.uptime_s)}"),
    ]
    if description.model is not None:
        rows.append(
            ("model", f"{description.model.name}, {description.model.context_tokens} tokens of context")
        )
        if description.model.adapters:
            rows.append(("adapters", ", ".join(description.model.adapters)))
    if now.numbers:
        rows.append(("requests", _requests(now, rate)))
        rows += [("", line) for line in _waiting(now)]
        rows += _front_ends(now)
    if now.memory:
        rows.append(("memory", memory_line(now.memory)))
    if now.numbers.get("restarts"):
        rows.append(("restarts", f"{now.numbers['restarts']}: the log says why"))
    return columns(rows)


def _state(description: Description, now: Status) -> str:
    progress = description.progress
    if now.state in ("loading", "warming"):
        done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        return f"{now.state}: {progress.stage}{done}"
    return f"{now.state} {description.message}".strip()


def _requests(now: Status, rate: float | None) -> str:
    numbers = {name: int(number) for name, number in now.numbers.items()}
    running = numbers.get("running", 0)
    if not running and not numbers.get("queued", 0):
        return "none"
    prefill = numbers.get("rows_prefilling", 0)
    text = f"{running} running"
    if prefill:
        text += f" ({prefill} reading a prompt)"
    text += f", {numbers.get('queued', 0)} waiting"
    return text if rate is None else f"{text}, {rate:,.0f} tokens/s"


def _waiting(now: Status) -> Iterator[str]:
    reasons = Counter(request.waits_for.partition(":")[0] for request in now.requests if request.waits_for)
    for reason, number in reasons.most_common():
        yield f"{number} wait{'s' if number == 1 else ''} {WAITS.get(reason, f'for: {reason}')}"


def _front_ends(now: Status) -> list[tuple[str, str]]:
    named = [session for session in now.sessions if session.client != "status"]
    if not named:
        others = int(now.numbers.get("sessions", 0)) - len(now.sessions)
        return [("front-ends", count(others, "front-end") if others > 0 else "none")]
    lines = [_front_end(session) for session in named]
    return list(zip(["front-ends", *[""] * (len(lines) - 1)], lines, strict=True))


def _front_end(session: SessionInfo) -> str:
    behind = f", {session.unsent_tokens:,} tokens behind" if session.lagging else ""
    return f"{session.client or session.id}: {session.running} running, {session.waiting} waiting{behind}"


def _everything(now: Status) -> list[str]:
    rows = sorted(now.facts.items())
    rows += [(name, _number(number)) for name, number in sorted(now.numbers.items())]
    return columns(rows)


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.3f}".rstrip("0").rstrip(".")
