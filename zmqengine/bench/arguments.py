"""Parsers for option values of `zmqengine bench`: targets and sizes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from zmqengine.bench.targets.server_usage import listening_pid
from zmqengine.bench.targets.target import TargetSpec
from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import resolve

Options = TypeVar("Options", bound=msgspec.Struct)


def worker_target(text: str) -> TargetSpec:
    """A zmqengine worker from `[LABEL=]ADDRESS`."""
    label, separator, address = text.rpartition("=")
    full = resolve(address)
    return TargetSpec(label=label if separator else address, kind="worker", address=full, worker=full)


def server_target(text: str, api: str) -> TargetSpec:
    """A server from `[LABEL=]URL[#MODEL]`, with its process if that is on this machine."""
    start = text.find("http://")
    if start < 0:
        raise ConfigError(f"{text}: give a URL like http://127.0.0.1:8080/v1#model-name")
    label, (url, _, name) = text[:start].rstrip("="), text[start:].partition("#")
    pid = listening_pid(url)
    return TargetSpec(
        label=label or url,
        kind="http",
        address=url,
        model=name or "default",
        api="chat" if api == "chat" else "completions",
        pids=[pid] if pid else [],
    )


def with_settings(options: Options, settings: tuple[str, ...]) -> Options:
    """A copy of `options` with the `NAME=JSON` settings. Raises ConfigError, naming the wrong setting."""
    values: dict[str, Any] = msgspec.to_builtins(options)
    for text in settings:
        name, value = name_and_value(text, "--set")
        if name not in values:
            raise ConfigError(f"--set {name}: there is {', '.join(values)}")
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name] = value
    try:
        return msgspec.convert(values, type(options))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error


def name_and_value(text: str, option: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`, a value of `option`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{option} {text}: give NAME=VALUE")
    return name, value
