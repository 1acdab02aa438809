"""Child processes that outlive the launcher: each has a record, a file that is locked for as long as the process lives.

The lock belongs to the open file, which the process inherits, so it never lives without the lock. The next launcher
finds the process by the record, however the earlier one ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from zmqengine.python_child import python_environment

WORDS_BYTES = 16_384
"""Bytes at the end of a log that are searched for its last line."""
WORDS_CHARS = 400
LOG_BYTES_MAX = 10 << 20
"""Bytes of a log before it is kept aside as NAME.log.1, which replaces the one before."""
NEWS = re.compile(r'[0-9:.]+ info |\{"time":"[^"]*","level":"info"')
"""The start of a line that tells of no failure: the last one of a process that was killed."""


class Record(msgspec.Struct, frozen=True):
    """Record of one process: its name, the signature of its options, its pid and its address."""

    name: str
    signature: str
    address: str
    pid: int = 0


class Child:
    """A process in a session of its own, started here or found by its record. `code`: exit code, None while it runs or
    if unknown."""

    def __init__(self, record: Record, path: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.record = record
        self.code: int | None = None
        self._path = path
        self._process = process

    @property
    def log(self) -> Path:
        """The log file of the process."""
        return self._path.with_suffix(".log")

    def has_ended(self) -> bool:
        """Whether the process has ended; never blocks."""
        if self._process is not None:
            self.code = self._process.poll()
            return self.code is not None
        return read_record(self._path) is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to a running process."""
        # While the record is locked, the pid cannot belong to another process.
        if not self.has_ended() and self.record.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.record.pid, number)

    def learn_pid(self, pid: int) -> None:
        """Note the pid as reported by the process: a record on a full disk may lack it."""
        if not self.record.pid:
            self.record = msgspec.structs.replace(self.record, pid=pid)

    def touch(self) -> None:
        """Update the file times, so that cleaners of /tmp leave the files alone."""
        for path in (self._path, self.log):
            with contextlib.suppress(OSError):
                os.utime(path)

    def rotate_log(self) -> None:
        """Keep a long log aside and begin a new one. Lines that are written in this moment may be lost."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_BYTES_MAX:
                aside = self.log.with_name(f"{self.log.name}.1")
                # Copied, since the process goes on to write into the open file.
                shutil.copyfile(self.log, aside)
                aside.chmod(0o600)
                os.truncate(self.log, 0)

    def last_words(self) -> str:
        """The last line of its log that may say why it ended; empty without one."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - WORDS_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip() and not NEWS.match(line)]
        return said[-1][:WORDS_CHARS] if said else ""


def start(path: Path, record: Record, command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Start a process with its record at `path`. Raises OSError, also while an earlier process of this record runs."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(file, record)
        log = os.open(
            path.with_suffix(".log"),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
            0o600,
        )
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(file,),
                env=python_environment(environment),
                start_new_session=True,
            )
        finally:
            os.close(log)
        record = msgspec.structs.replace(record, pid=process.pid)
        # On a full disk the process runs without a written pid: a later launcher learns it from the process's answer.
        with contextlib.suppress(OSError):
            _write(file, record)
    finally:
        os.close(file)
    return Child(record, path, process)


def find(path: Path) -> Child | None:
    """The live process of the record at `path`; None if it has ended."""
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
