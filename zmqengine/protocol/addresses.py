"""Addresses of a worker: one public address, that of ctl, from which the other two follow.

A bare name stands for an ipc path under the user's own directory: `default` is
`ipc:///tmp/zmqengine-<uid>/default/ctl`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from zmqengine.errors import ConfigError

IPC_PATH_BYTES_MAX = 103
"""macOS allows 103 bytes and a null in `sockaddr_un.sun_path`; Linux 107."""

DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]/]+):(?P<port>[0-9]{1,5})\Z")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of the three sockets of a worker, as ZeroMQ takes them."""

    ctl: str
    cmd: str
    out: str

    @property
    def is_ipc(self) -> bool:
        """Whether the sockets are files."""
        return self.ctl.startswith("ipc://")


def base_directory() -> Path:
    """The directory of named workers: `$ZMQENGINE_DIR`, or `/tmp/zmqengine-<uid>`."""
    configured = os.environ.get("ZMQENGINE_DIR")
    return Path(configured) if configured else Path(f"/tmp/zmqengine-{os.getuid()}")


def resolve(address: str | None) -> str:
    """The full ctl address for what a user typed: a name, an address, or nothing.

    Nothing stands for `$ZMQENGINE_ADDRESS`, or else for the name `default`.
    Raises `ConfigError` for anything else.
    """
    address = address or os.environ.get("ZMQENGINE_ADDRESS") or DEFAULT_NAME
    if _NAME.match(address):
        return _checked_ipc(f"ipc://{base_directory()}/{address}/ctl")
    if address.startswith("ipc://"):
        return _checked_ipc(address)
    if address.startswith("tcp://"):
        tcp_host_port(address)
        return address
    raise ConfigError(
        f"{address!r} is not a worker address: give a name (letters, digits, '.', '_', '-'), "
        "ipc:///DIRECTORY/ctl or tcp://HOST:PORT"
    )


def start_command(ctl: str) -> str:
    """The command that starts a worker at a resolved ctl address."""
    if not ctl.startswith("ipc://"):
        return f"zmqengine worker --bind {ctl}"
    directory = ipc_path(ctl).parent
    if directory.parent != base_directory() or not _NAME.match(directory.name):
        return f"zmqengine worker --bind {ctl}"
    return (
        "zmqengine worker" if directory.name == DEFAULT_NAME else f"zmqengine worker --name {directory.name}"
    )


def endpoints(ctl: str) -> Endpoints:
    """The three addresses to bind for a resolved ctl address.

    ipc: `cmd` and `out` beside `ctl`. tcp: the next two ports, or any free ones if the port is 0.
    """
    if ctl.startswith("ipc://"):
        directory = ctl.rsplit("/", 1)[0]
        return Endpoints(ctl, f"{directory}/cmd", f"{directory}/out")
    host, port = tcp_host_port(ctl)
    if port > 65_533:
        raise ConfigError(f"{ctl}: the two ports after {port} are needed too; choose one up to 65533")
    following = (0, 0) if port == 0 else (port + 1, port + 2)
    return Endpoints(ctl, f"tcp://{host}:{following[0]}", f"tcp://{host}:{following[1]}")


def as_seen_from(ctl: str, described: str) -> str:
    """A described address with a wildcard host replaced by the host this front-end reached ctl at."""
    if not described.startswith("tcp://"):
        return described
    host, port = tcp_host_port(described)
    if host in ("*", "0.0.0.0", "[::]"):
        host = tcp_host_port(ctl)[0]
    return f"tcp://{host}:{port}"


def tcp_host_port(address: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`; raises `ConfigError` if it is not of that form."""
    match = _TCP.match(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"{address!r} is not of the form tcp://HOST:PORT with a port from 0 to 65535")
    return match["host"], int(match["port"])


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address. Of host names, only localhost counts."""
    return address.startswith("ipc://") or is_loopback_host(tcp_host_port(address)[0])


def is_loopback_host(host: str) -> bool:
    """Whether only this machine can reach the host. Of names, only localhost counts."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ipc_path(address: str) -> Path:
    """The file behind an ipc address."""
    assert address.startswith("ipc://")
    return Path(address.removeprefix("ipc://"))


def is_listened_to(path: Path) -> bool:
    """Whether a process listens on the socket file, even a stopped or busy one. Nothing is sent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK)


def is_absent(address: str) -> bool:
    """Whether an ipc address has no socket file, so that nothing answers there."""
    return address.startswith("ipc://") and not ipc_path(address).exists()


def _checked_ipc(address: str) -> str:
    path = ipc_path(address)
    if not path.is_absolute() or path.name != "ctl" or len(path.parts) < 3 or "\0" in address:
        raise ConfigError(f"{address!r}: an ipc address is ipc:///ABSOLUTE/DIRECTORY/ctl")
    length = len(os.fsencode(path))
    if length > IPC_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, the system allows {IPC_PATH_BYTES_MAX}: "
            "choose a shorter name, or a shorter directory with ZMQENGINE_DIR"
        )
    return address
