"""The HTTP front-end beside a launcher: a process that outlives it, as its workers do."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from zmqengine.serve import child
from zmqengine.serve.child import Child, Record

log = logging.getLogger("zmqengine.launcher")

NAME = "http"
LEAST_S = 60.0
"""Seconds after its start within which a failed front-end counts as unable to serve. Busy machines start processes
slowly."""


def running_url(root: Path) -> str | None:
    """The address of the front-end that an earlier launcher has left; None without one."""
    earlier = child.find(root / f"_{NAME}.front-end")
    return None if earlier is None else earlier.record.address


class HttpFrontEnd:
    """The front-end process: started by the launcher or adopted from an earlier one, and restarted when it ends.

    `url`: its address. `process`: None until it runs.
    """

    def __init__(self, root: Path, command: Sequence[str], url: str) -> None:
        self.url = url
        self.process: Child | None = None
        self._path = root / f"_{NAME}.front-end"
        self._command = list(command)
        self._started_s = 0.0
        self._retired_pid = 0
        """A draining front-end of an earlier launcher, with other options."""

    def keep(self) -> bool:
        """Start it if it does not run. False if it cannot serve: wrong options, or a port in use."""
        known = self.process
        if known is not None:
            if not known.has_ended():
                return True
            if (known.code or 0) > 0 and time.monotonic() < self._started_s + LEAST_S:
                log.error("%s cannot serve: %s", NAME, known.last_words())
                return False
            words = known.last_words()
            log.warning("%s has ended: starting it again", NAME, extra={"last_words": words} if words else {})
        self.process = self._find_or_start()
        return True

    def _find_or_start(self) -> Child | None:
        """The running or a new process; None while one with other options drains, or if none can be started now."""
        signature = " ".join(self._command)
        earlier = child.find(self._path)
        if earlier is not None and earlier.record.signature == signature:
            return earlier
        if earlier is not None:
            if earlier.record.pid != self._retired_pid:
                # A second signal would end its streams.
                self._retired_pid = earlier.record.pid
                earlier.send(signal.SIGTERM)
            return None
        self._started_s = time.monotonic()
        try:
            return child.start(self._path, Record(NAME, signature, self.url), self._command, {})
        except OSError as error:
            log.error("cannot start %s: %s", NAME, error)
            return None
