"""Presence of the worker at the other end of ctl, and the time that a client waits for it."""

from __future__ import annotations

from math import inf

from zmqengine.errors import AnswerTimeout, ModelLoadError, NotReady, WorkerLost, ZmqEngineError
from zmqengine.protocol.addresses import resolve, start_command
from zmqengine.protocol.messages import Description
from zmqengine_client.core.connection import Connection, SessionConfig
from zmqengine_client.core.phases import RequestPhase
from zmqengine_client.core.request import Request


class Presence:
    """The worker as seen through ctl: when it last answered, when it went away, how far it has loaded.

    `progressed_at`: when a loading worker last reported progress. `refused`: this client's key is not authorized.
    """

    def __init__(self) -> None:
        self.description: Description | None = None
        self.heard_at = -inf
        self.lost_at = -inf
        self.progressed_at = -inf
        self.connected = False
        self.handshake_failures = 0
        self.refused = False

    @property
    def was_heard(self) -> bool:
        """Whether a worker has ever answered."""
        return self.heard_at > -inf

    def came_up(self) -> None:
        """The connection is established, its handshake done."""
        self.connected = True
        self.handshake_failures = 0
        self.refused = False

    def broke(self, now: float) -> bool:
        """Note that the connection broke; returns whether a worker had answered on it."""
        was_there, self.connected = self.connected, False
        # Workers that connect and never answer do not prolong the wait for one that does.
        if was_there and (self.lost_at == -inf or self.heard_at > self.lost_at):
            self.lost_at = now
        return was_there

    def described(self, description: Description, now: float) -> None:
        """Take a new description of the worker."""
        if description.state in ("loading", "warming") and _progress(description) != _progress(
            self.description
        ):
            self.progressed_at = now
        self.description = description


def _progress(description: Description | None) -> object:
    return description and (description.epoch, description.state, description.progress)


class Patience:
    """Timeouts of requests and control calls. Each error says what the user can do about it."""

    def __init__(self, config: SessionConfig, presence: Presence) -> None:
        self._config = config
        self._presence = presence

    def _connect_s(self) -> float:
        """Seconds to wait for a sign of life."""
        return self._config.connect_s if self._presence.was_heard else self._config.first_sign_s

    def control_timeout_s(self, timeout_s: float | None) -> float:
        """Seconds that a control call waits for its answer."""
        if timeout_s is not None:
            return timeout_s
        config = self._config
        return config.answer_timeout_s if self._presence.was_heard else self._connect_s()

    def control_error(self, waited_s: float) -> ZmqEngineError:
        """The error of a control call without an answer."""
        if self._presence.connected and self._presence.was_heard:
            return AnswerTimeout(
                f"the worker at {self._config.address} has not answered for {waited_s:.1f} s; it may be hanging: "
                "see its log, or restart it"
            )
        return self.lost_error(waited_s)

    def opening_error(
        self, since: float, now: float, timeout_s: float | None = None
    ) -> ZmqEngineError | None:
        """The error that ends a wait for a ready worker begun at `since`; None to wait on."""
        config, presence = self._config, self._presence
        ready_s = inf if config.ready_timeout_s is None else config.ready_timeout_s
        connect_s = self._connect_s()
        if timeout_s is not None:
            # A caller with a timeout expects a worker that is about to start.
            ready_s, connect_s = timeout_s, min(timeout_s, config.connect_s)
        waited = now - since
        silent = now - max(since, presence.heard_at)
        description = presence.description if presence.heard_at > since else None
        if description is None or silent >= connect_s:
            return self.lost_error(silent) if silent >= connect_s else None
        if description.state == "failed" and waited >= connect_s:
            return ModelLoadError(description.message or "the worker could not load its model")
        if waited >= ready_s and description.state != "ready":
            return NotReady(
                f"the worker at {config.address} is still {description.state} after {waited:.1f} s"
                f" ({description.progress.stage}); wait longer with ready_timeout_s",
                retry_after_ms=1000,
            )
        return None

    def request_error(self, request: Request, connection: Connection, now: float) -> ZmqEngineError | None:
        """The error that ends a request without a live session; None to wait on."""
        config, presence = self._config, self._presence
        if request.phase is not RequestPhase.WAITING:
            patience_s = config.worker_lost_timeout_s
            if not config.resume:
                patience_s = min(patience_s, self._connect_s())
            # A worker that makes progress in loading is not lost: a large model takes longer than any time-out.
            gone_s = now - max(connection.lost_at, presence.progressed_at)
            return self._given_up_error(gone_s, now) if gone_s >= patience_s else None
        since = max(request.added_at, connection.opening_since or inf)
        if now - since >= config.answer_timeout_s:
            return AnswerTimeout(
                f"the worker at {config.address} is ready but opens no session; it may be hanging: see its log"
            )
        error = self.opening_error(request.added_at, now)
        gone_s = now - max(connection.lost_at, presence.lost_at)
        may_come_back = gone_s < config.worker_lost_timeout_s
        return None if may_come_back and isinstance(error, WorkerLost) else error

    def lost_error(self, silent_s: float) -> WorkerLost:
        """No worker answers at the address."""
        address = self._config.address
        command = start_command(address)
        if not self._presence.was_heard and self._config.is_absent(address):
            every = ", or `zmqengine serve` for every model" if address == resolve(None) else ""
            return WorkerLost(
                f"no worker runs at {address}: start one with `{command}`{every}", retry_after_ms=1000
            )
        advice = f"is it running? Start it with: {command}"
        if self._presence.handshake_failures:
            advice = "the handshake failed: check the keys of both sides"
        return WorkerLost(
            f"no worker has answered at {address} for {silent_s:.1f} s: {advice}", retry_after_ms=1000
        )

    def _given_up_error(self, gone_s: float, now: float) -> ZmqEngineError:
        """The error of streams whose worker does not come back, or makes no progress at its start."""
        description = self._presence.description
        silent = now - self._presence.heard_at >= self._connect_s()
        if description is None or silent or description.state == "ready":
            return self.lost_error(gone_s)
        return WorkerLost(
            f"the worker at {self._config.address} was started again and has been {description.state} "
            f"({description.progress.stage}) for {gone_s:.1f} s without getting further: see its log",
            retry_after_ms=1000,
        )
