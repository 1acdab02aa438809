"""Processes that outlive the launcher: each has a record, a file that is locked for as long as the process lives.

The lock belongs to the open file, which the process inherits: there is no moment at which it lives without the lock.
The next launcher finds the record, and with it the process, however the earlier one ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

WORDS_BYTES = 16_384
"""The last words of a process are looked for in this much of the end of its log."""
WORDS_CHARS = 400


class Record(msgspec.Struct, frozen=True):
    """One process: its name, its options or a word for them, and where it is found."""

    name: str
    signature: str
    address: str
    pid: int = 0


class Child:
    """One process in a session of its own, started here or found. `code` is None while it runs or is not known."""

    def __init__(self, record: Record, path: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.record = record
        self.code: int | None = None
        self._path = path
        self._process = process

    @property
    def log(self) -> Path:
        """The file of what it says."""
        return self._path.with_suffix(".log")

    def has_ended(self) -> bool:
        """Whether it has; never blocks."""
        if self._process is not None:
            self.code = self._process.poll()
            return self.code is not None
        return read_record(self._path) is None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        # While the record is locked the pid is nobody else's.
        if not self.has_ended() and self.record.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.record.pid, number)

    def learn_pid(self, pid: int) -> None:
        """The process tells its pid, which a record on a full disk may lack."""
        if not self.record.pid:
            self.record = msgspec.structs.replace(self.record, pid=pid)

    def touch(self) -> None:
        """Keep its files from what cleans /tmp."""
        for path in (self._path, self.log):
            with contextlib.suppress(OSError):
                os.utime(path)

    def last_words(self) -> str:
        """The last line of its log that says something; empty if there is none."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - WORDS_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:WORDS_CHARS] if said else ""


def start(path: Path, record: Record, command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Start a process with its record at `path`. Raises OSError, also where one of this record still runs."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(file, record)
        log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(file,),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        finally:
            os.close(log)
        record = msgspec.structs.replace(record, pid=process.pid)
        # It runs already: where the disk is full, only the next launcher does not know its pid before it answers.
        with contextlib.suppress(OSError):
            _write(file, record)
    finally:
        os.close(file)
    return Child(record, path, process)


def find(path: Path) -> Child | None:
    """The process of the record at `path`, if it lives."""
    record = read_record(path)
    return None if record is None else Child(record, path, None)


def read_record(path: Path) -> Record | None:
    """The record at `path`; None if its process has ended."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.pread(file, 65_536, 0), type=Record)
    finally:
        os.close(file)
    return None


def _write(file: int, record: Record) -> None:
    text = msgspec.json.encode(record)
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))
