"""Findings of a worker: whether it can be reached, with which keys, and its description."""

from __future__ import annotations

from collections.abc import Iterator

import zmqengine
from zmqengine.doctor.finding import Finding
from zmqengine.errors import ConfigError, ZmqEngineError
from zmqengine.protocol.addresses import ipc_path, is_loopback, resolve
from zmqengine.protocol.messages import Description, Status
from zmqengine_client import Client
from zmqengine_client.keys import CurveKeys, keys_from_environment

ANSWER_S = 3.0
_SLOW_PASS_MS = 20_000.0
"""An idle worker makes a pass every 10 s."""
_FULL = 0.97


def look_at_worker(address: str | None, keys: CurveKeys | None, *, required: bool) -> Iterator[Finding]:
    """Look at one worker. If it is not `required`, a worker that does not run is no failure."""
    try:
        resolved = resolve(address)
        keys = keys or keys_from_environment()
    except ConfigError as error:
        yield Finding("fail", "worker", str(error))
        return
    if keys is None and not is_loopback(resolved):
        text = f"{resolved} is on a network and no keys are set"
        yield Finding(
            "fail", "keys", text, "make them with `zmqengine keygen`, give --client-key and --server-key"
        )
        return
    if resolved.startswith("ipc://") and not ipc_path(resolved).exists():
        yield _silent(resolved, with_keys=False, required=required)
        return
    with Client(
        resolved, name="doctor", keys=keys, connect_timeout_s=ANSWER_S, answer_timeout_s=ANSWER_S
    ) as client:
        try:
            description, status = client.describe(), client.status()
        except ZmqEngineError:
            yield _silent(resolved, with_keys=keys is not None, required=required)
            return
    yield from _answers(resolved, description, status)


def _silent(address: str, *, with_keys: bool, required: bool) -> Finding:
    if with_keys:
        advice = "is it running, is its port open, and does it know your public key (--authorized-keys)?"
        return Finding("fail", "worker", f"no answer from {address}", advice)
    if required:
        return Finding("fail", "worker", f"no answer from {address}", "start it with `zmqengine worker`")
    return Finding(
        "ok", "worker", f"none runs at {address}; start one with `zmqengine serve` or `zmqengine worker`"
    )


def _answers(address: str, description: Description, status: Status) -> Iterator[Finding]:
    text = f"{description.name} at {address} is {status.state}, process {description.pid}"
    if status.state == "failed":
        yield Finding("fail", "worker", f"{text} ({description.message})", "its log says more")
    elif status.pass_age_ms > _SLOW_PASS_MS and status.state in ("ready", "draining"):
        text = f"{description.name} has been in one step for {status.pass_age_ms / 1000:.0f} s"
        yield Finding(
            "warn", "worker", text, "a hang ends by itself after --pass-timeout; its log says what runs"
        )
    else:
        yield Finding("ok", "worker", text)
    if description.version != zmqengine.__version__:
        text = f"the worker is version {description.version}, this is {zmqengine.__version__}"
        yield Finding("warn", "version", text, "update the older one")
    held = sum(size for part, size in status.memory.items() if part != "limit")
    limit = status.memory.get("limit", 0)
    if limit and held > limit * _FULL:
        text = f"memory is full: {held / 2**30:.1f}G of {limit / 2**30:.1f}G"
        yield Finding(
            "warn", "memory", text, "fewer or shorter chats, a higher --memory-limit, or a smaller model"
        )
    yield from _wired(status.facts.get("wired", ""))
    yield from _nice(status.facts.get("nice", ""))
    yield from _kv_bits(status.facts.get("kv_bits", ""))
    if status.numbers.get("restarts"):
        text = f"it was started again {status.numbers['restarts']:.0f} times"
        yield Finding("warn", "restarts", text, "its log says why")


def _wired(wired: str) -> Iterator[Finding]:
    """The wired limit of a worker on Metal, as it reports it; empty elsewhere."""
    if wired.startswith(("weights", "off")):
        yield Finding("ok", "wired", f"wired memory: {wired}")
    elif wired:
        text = f"the wired limit is {wired}; more than the weights can make macOS panic"
        yield Finding("warn", "wired", text, "--wired-limit weights, see docs/macs.md")


def _kv_bits(gained: str) -> Iterator[Finding]:
    """The gain of `--kv-bits 8`, as a worker reports it; empty without."""
    if gained:
        yield Finding("ok", "kv bits", gained)


def _nice(nice: str) -> Iterator[Finding]:
    """How far a worker on macOS gives way to other programs, as it reports it; empty where it does not."""
    if nice:
        text = (
            f"it runs with nice {nice}: macOS may end its work on the GPU beside programs of higher priority"
        )
        yield Finding("warn", "nice", text, "start it without nice; in zsh: setopt no_bg_nice, or without &")
