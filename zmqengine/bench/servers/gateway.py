"""Commands of the SMG gateway over one of its wires: the adapter of a worker, and the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

Wire = Literal["grpc", "zmq"]
WIRES: tuple[Wire, ...] = ("grpc", "zmq")


class SmgCommands(NamedTuple):
    """Python arguments of the two processes, and the directory that the adapter writes before the gateway starts."""

    adapter: list[str]
    gateway: list[str]
    tokenizer: Path


def smg_commands(wire: Wire, worker: str, directory: Path, ports: tuple[int, int, int]) -> SmgCommands:
    """Commands for the worker at this address; `ports` of the gateway, its metrics, and the adapter."""
    port, metrics_port, adapter_port = ports
    tokenizer = directory / f"smg-{wire}"
    adapter = ["-m", "zmqengine.cli.main", "smg", "--worker", worker, "--tokenizer-dir", str(tokenizer)]
    gateway = ["-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    gateway += [
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(metrics_port),
        "--log-level",
        "warn",
    ]
    gateway += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    if wire == "grpc":
        adapter += ["--listen", f"127.0.0.1:{adapter_port}"]
        gateway += ["--worker-urls", f"grpc://127.0.0.1:{adapter_port}"]
    else:
        url = f"ipc://{directory}/smg-engine"
        adapter += ["--engine", url]
        gateway += ["--worker-urls", url, "--backend", "vllm", "--model-path", str(tokenizer)]
    return SmgCommands(adapter, gateway, tokenizer)
