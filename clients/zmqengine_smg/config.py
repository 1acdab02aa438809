"""The options of one adapter: the worker, and the address at which the gateway reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from zmqengine.protocol.addresses import is_loopback, tcp_host_port
from zmqengine_client import CurveKeys
from zmqengine_client.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SmgConfig:
    """One adapter, which serves gRPC at `listen` (HOST:PORT).

    `patience_s`: how long requests wait for a worker that has died. `drain_s`: how long they may go on after
    SIGTERM. Raises `ConfigError`.
    """

    worker: str | None = None
    keys: CurveKeys | None = None
    listen: str
    insecure_no_key: bool = False
    patience_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.insecure_no_key and not is_loopback(f"tcp://{self.listen}"):
            raise ConfigError(
                f"--listen {self.listen} is open to the network, and the gateway's gRPC knows neither keys nor "
                "encryption: run this beside the gateway, with the worker on tcp:// and keys between the two, or say "
                "--insecure-no-key"
            )

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of the gRPC service."""
        return tcp_host_port(f"tcp://{self.listen}")
