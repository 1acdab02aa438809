"""What is known of the worker at the other end of ctl."""

from __future__ import annotations

from math import inf

from zmqengine.protocol.messages import Description


class Presence:
    """When ctl last said something, when a worker that was there went, and how far a loading one is.

    `progressed_at` is when a worker that is getting ready was last further than before; `refused` is that this
    client's key was not authorized.
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
        """The connection is up, its handshake done."""
        self.connected = True
        self.handshake_failures = 0
        self.refused = False

    def broke(self, now: float) -> bool:
        """The connection broke; says whether a worker had been there."""
        was_there, self.connected = self.connected, False
        # Workers that come up and never say a word do not prolong the wait for one that does.
        if was_there and (self.lost_at == -inf or self.heard_at > self.lost_at):
            self.lost_at = now
        return was_there

    def described(self, description: Description, now: float) -> None:
        """The worker told how it is."""
        if description.state in ("loading", "warming") and _how_far(description) != _how_far(
            self.description
        ):
            self.progressed_at = now
        self.description = description


def _how_far(description: Description | None) -> object:
    return description and (description.epoch, description.state, description.progress)
