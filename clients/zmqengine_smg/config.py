"""The options of one adapter: the worker, and the address at which the gateway reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zmqengine.protocol.addresses import is_loopback, tcp_host_port
from zmqengine_client import CurveKeys
from zmqengine_client.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 103 - len("-out.sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmgConfig:
    """One adapter. Exactly one of `listen` (HOST:PORT, gRPC) and `engine` (ipc://PATH, ZeroMQ) selects the wire.

    `patience_s`: how long requests wait for a worker that has died. `drain_s`: how long they may go on after
    SIGTERM. `tokenizer_directory`: where to write the files that `smg launch --model-path` reads. Raises
    `ConfigError`.
    """

    worker: str | None = None
    keys: CurveKeys | None = None
    listen: str | None = None
    engine: str | None = None
    insecure_no_key: bool = False
    tokenizer_directory: Path | None = None
    patience_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if (self.listen is None) == (self.engine is None):
            raise ConfigError("give one of --listen HOST:PORT (gRPC) and --engine ipc://PATH (ZeroMQ)")
        if self.listen is not None and not self.insecure_no_key and not is_loopback(f"tcp://{self.listen}"):
            raise ConfigError(
                f"--listen {self.listen} is open to the network, and the gateway's gRPC knows neither keys nor "
                "encryption: run this beside the gateway, with the worker on tcp:// and keys between the two, or say "
                "--insecure-no-key"
            )
        if self.engine is not None:
            _check_engine(self.engine)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of the gRPC service."""
        return tcp_host_port(f"tcp://{self.listen}")


def _check_engine(address: str) -> None:
    path = address.removeprefix("ipc://")
    if path == address or not path.startswith("/"):
        raise ConfigError(f"--engine {address}: give ipc:///ABSOLUTE/PATH, as in the gateway's --worker-urls")
    if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"--engine {address}: the gateway adds to this path, which may have {SOCKET_PATH_BYTES_MAX} bytes at most"
        )
