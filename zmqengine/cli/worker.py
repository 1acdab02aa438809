"""`zmqengine worker`: every field of `WorkerConfig` as an option."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import click

from zmqengine.cli.byte_size import byte_size, shown
from zmqengine.config import LogFormat, LogLevel, WorkerConfig, option_name

HELP = {
    "model": "pico, pico-tools, a local directory, or a hub id that mlx-lm can load.",
    "name": "What front-ends call this worker on this machine.",
    "bind": "Where to listen instead: tcp://HOST:PORT (port 0: any free one) or ipc:///DIRECTORY/ctl.",
    "rows_max": "Requests generated at once.",
    "prefill_chunk": "Prompt tokens read in one pass, at the most.",
    "prefill_ms": "Milliseconds that reading prompts may add to a pass while others decode; 0 for no limit.",
    "prompt_cache_bytes": "Memory for prompts that start alike; 0 for none.",
    "context_max": "Tokens of prompt and output that one request may hold; the default is what the model has.",
    "growth_tokens": "Memory promised to a row ahead of its output, in tokens.",
    "memory_limit_bytes": "Memory that MLX may use; the default is an equal part of what other workers here leave.",
    "wired_limit": "macOS: memory that is never paged out: auto (the memory limit), off, or a size such as 12G. "
    "Turn it off if the machine freezes under load.",
    "queue_max": "Requests that may wait; past it they are refused with a hint when to come back.",
    "ageing_s": "What more urgent work has kept waiting so long gets every 20th start.",
    "share": "A front-end's share of the service, by its name or key:BEGINNING; 'chat*=4'. Once for each rule.",
    "priority_min": "The most urgent priority a front-end may ask for; 'nightly*=1' makes it batch work.",
    "sessions_max": "Front-ends at once.",
    "peer_share": "Share of the sessions that one key or process may have.",
    "requests_per_session_max": "Requests of one front-end at once.",
    "frame_bytes_max": "Longest message from a front-end.",
    "token_log_bytes_max": "Tokens kept for one front-end until it has acknowledged them.",
    "session_backlog_tokens_max": "Tokens that a front-end may be behind before its requests end.",
    "lease_ms": "Silence after which a front-end counts as gone.",
    "grace_ms": "From a lost connection to the end of its requests.",
    "drain_timeout_s": "What running requests get to finish when the worker is told to stop.",
    "pass_timeout_s": "A pass that takes longer ends the process; 0 for never.",
    "load_timeout_s": "Loading that gets no further for so long ends the process; 0 for never.",
    "slow_pass_ms": "A pass that takes longer is logged.",
    "engine_failures_max": "Failed steps in the window before the process ends.",
    "engine_failures_window_s": "The window for --engine-failures-max.",
    "log_level": "How much to log.",
    "log_format": "How to log.",
    "supervise": "Start the worker again when it dies. Turn off under launchd, systemd or a container.",
    "restarts_max": "Restarts before giving up.",
    "restart_window_s": "After this long in the ready state, restarts are counted from zero again.",
    "restart_wait_ms": "Before the first restart; doubles each time.",
    "restart_wait_max_ms": "The longest wait before a restart.",
    "die_with_parent": "Drain when the process that started this one ends.",
    "authorized_keys": "Directory of the public keys that may connect over tcp.",
    "server_key": "File of the worker's own secret key.",
    "operator_keys": "Directory of the public keys that may drain the worker.",
}
HIDDEN = {"engine", "fault_drop_frames"}
INTERNAL = {"bind_cmd", "bind_out"}


def _options(command: click.Command) -> click.Command:
    types = typing.get_type_hints(WorkerConfig)
    for field in dataclasses.fields(WorkerConfig):
        if field.name not in INTERNAL:
            command.params.append(_option(field.name, types[field.name], field.default))
    return command


def _option(name: str, kind: Any, default: Any) -> click.Option:
    flag = option_name(name)
    text, hidden = HELP.get(name, ""), name in HIDDEN
    if kind is bool:
        flags = f"{flag}/--no-{flag.removeprefix('--')}" if default else flag
        return click.Option([flags, name], default=default, is_flag=True, help=text, show_default=True)
    if name == "wired_limit":
        return click.Option(
            [flag, name], default=default, type=_wired, metavar="SIZE", help=text, show_default=True
        )
    if "bytes" in name:
        text += "" if default is None else f"  [default: {shown(default)}]"
        return click.Option([flag, name], default=default, type=byte_size, metavar="SIZE", help=text)
    if kind == tuple[str, ...]:
        return click.Option([flag, name], multiple=True, metavar="NAME=NUMBER", help=text)
    if kind in (LogLevel, LogFormat):
        choices = click.Choice(typing.get_args(kind))
        return click.Option([flag, name], default=default, type=choices, help=text, show_default=True)
    type_ = next(plain for plain in (int, float, str) if plain in (kind, *typing.get_args(kind)))
    return click.Option(
        [flag, name],
        default=default,
        type=type_,
        metavar="SECONDS" if name.endswith("_s") else None,
        help=text,
        hidden=hidden,
        show_default=default is not None,
    )


def _wired(value: str) -> str:
    return value if value in ("auto", "off") else str(byte_size(value))


@_options
@click.command(context_settings={"auto_envvar_prefix": "ZMQENGINE_WORKER"})
def worker(**options: Any) -> int:
    """Load a model and share it with every program that connects.

    Without options: the bundled model pico, for the programs of this user on this machine. Every option
    can come from the environment: --queue-max is ZMQENGINE_WORKER_QUEUE_MAX. SIGTERM and Ctrl-C let
    running requests finish; a second one ends the worker at once.
    """
    config = WorkerConfig(**options)
    from zmqengine.worker.logs import set_up

    set_up(config.log_level, config.log_format)
    if not config.supervise:
        from zmqengine.worker.main import serve

        return serve(config)
    from zmqengine.worker.parent import EXIT_HOPELESS
    from zmqengine.worker.supervisor import supervise

    code = supervise(config)
    # The code is for service managers, which run without a supervisor of ours.
    return 1 if code == EXIT_HOPELESS else code
