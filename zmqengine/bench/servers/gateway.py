"""Commands of the SMG gateway: the adapter of a worker, and the gateway."""

from __future__ import annotations

from typing import NamedTuple


class SmgCommands(NamedTuple):
    """Modules and arguments of the two processes."""

    adapter: list[str]
    gateway: list[str]


def smg_commands(worker: str, ports: tuple[int, int, int]) -> SmgCommands:
    """Commands for the worker at this address; `ports` of the gateway, its metrics, and the adapter."""
    port, metrics_port, adapter_port = ports
    listen = f"127.0.0.1:{adapter_port}"
    adapter = ["zmqengine.cli.main", "smg", "--worker", worker, "--listen", listen]
    gateway = [
        "smg",
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        f"grpc://{listen}",
    ]
    gateway += [
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(metrics_port),
        "--log-level",
        "warn",
    ]
    gateway += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    return SmgCommands(adapter, gateway)
