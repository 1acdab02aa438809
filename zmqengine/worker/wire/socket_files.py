"""The directory of one named worker and the socket files in it, for as long as the worker lives.

Systems clean /tmp: macOS removes files that were not touched for 3 days, systemd-tmpfiles after 10. It leaves a
directory alone that is locked; macOS does not. So the lock is on the directory itself, the files are touched, and
missing ones are bound anew: libzmq binds a path any number of times, and earlier connections stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

import zmq

from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import is_listened_to

log = logging.getLogger("zmqengine.worker")

NAMES = ("ctl", "cmd", "out")
TAKEN = "a worker is already running at {}; give this one another --name"


class SocketFiles:
    """Locks the directory of one named worker, since a second bind of a live ipc path would steal it.

    Raises `ConfigError`, with the text `taken`, if another worker has the lock, or if the directory cannot be used.
    Each socket's file is restored by the thread that uses the socket.
    """

    def __init__(self, directory: Path, taken: str = TAKEN) -> None:
        self._directory = directory
        self._mutex = threading.Lock()
        self._failing = False
        self.is_lost = False
        """Whether the directory was removed and another worker has taken its name."""
        try:
            self._fd = self._lock()
        except BlockingIOError:
            raise ConfigError(taken.format(directory)) from None
        except OSError as error:
            raise ConfigError(f"cannot use {directory} for sockets: {error.strerror}") from None
        # A directory that was removed and created again has no lock, although a worker may live in it.
        if any(is_listened_to(directory / name) for name in NAMES):
            os.close(self._fd)
            raise ConfigError(taken.format(directory))
        self._remove_sockets()

    def keep(self, zmq_socket: zmq.Socket[Any], path: Path) -> None:
        """Bind `path` again if its file is gone. A few microseconds if it is there; never raises."""
        try:
            if self._hold_directory() and not path.exists() and not hidden(path).exists():
                zmq_socket.bind(f"ipc://{path}")
                # Without the umask, which belongs to all threads; only this user can enter the directory anyway.
                path.chmod(0o600)
                log.warning("a socket file was removed and is there again", extra={"path": path})
            self._failing = False
        except (OSError, zmq.ZMQError) as error:
            if not self._failing:
                self._failing = True
                log.error("cannot restore a socket file", extra={"path": path, "reason": str(error)})

    def touch(self) -> None:
        """Set the file times of the directory and its files to now, so that cleaners of /tmp leave them alone.

        Likewise a launcher's record and log of this worker, which are beside the directory: the launcher may be gone.
        """
        if self.is_lost:
            return
        files = [self._directory / name for name in NAMES]
        files += [self._directory.with_name(f"{self._directory.name}.{kind}") for kind in ("json", "log")]
        for path in (self._directory.parent, self._directory, *files):
            with contextlib.suppress(OSError):
                os.utime(path)

    def release(self) -> None:
        """Remove the socket files and release the lock."""
        if not self.is_lost:
            self._remove_sockets()
            # Removed while locked: a later worker creates and locks a new directory.
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        os.close(self._fd)

    def _hold_directory(self) -> bool:
        """Whether the directory is this worker's; creates it again if it is gone."""
        with self._mutex:
            if self.is_lost or _is_at(self._fd, self._directory):
                return not self.is_lost
            try:
                fd = self._lock()
            except BlockingIOError:
                self.is_lost = True
                log.error(
                    "the directory of this worker was removed and another worker has its name: nobody new can "
                    "connect to this one",
                    extra={"path": self._directory},
                )
                return False
            os.close(self._fd)
            self._fd = fd
            return True

    def _lock(self) -> int:
        """A descriptor of the directory, created if need be, and locked. Raises `BlockingIOError` while another has the
        lock."""
        while True:
            _make_private(self._directory.parent, refuse_open=False)
            _make_private(self._directory, refuse_open=True)
            try:
                fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous owner may have removed it between open and lock: then try the new one.
                if _is_at(fd, self._directory):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _remove_sockets(self) -> None:
        for name in NAMES:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()


def hidden(path: Path) -> Path:
    """The name of a socket file while the worker does not accept connections."""
    return path.with_name(path.name + ".full")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _make_private(directory: Path, *, refuse_open: bool) -> None:
    """Create a directory that only its owner can enter; refuse one that another user owns or may enter."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{directory} belongs to another user; choose another directory with ZMQENGINE_DIR")
    if refuse_open and status.st_mode & 0o077:
        raise ConfigError(f"other users can enter {directory}: chmod 700 it, or choose another directory")
