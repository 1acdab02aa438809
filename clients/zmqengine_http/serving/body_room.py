"""A bound on the bodies of all requests together, so that a flood of images takes no memory without end."""

from __future__ import annotations

from zmqengine.errors import Overloaded

BODIES_MAX = 32
"""Bodies of the greatest length that there is room for: one for each row of a worker's batch, by default."""
_SHARE = 4
_RETRY_AFTER_MS = 1000


class BodyRoom:
    """Room for the bodies of requests that have not ended, `bytes_max` in all.

    A body may take a quarter of what others leave: where long ones find no room, short ones still do.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held = 0
        """Bytes of the bodies that have come and whose requests have not ended."""

    def check(self, size: int, held: int = 0) -> None:
        """Raise `Overloaded` for a body of `size` bytes that finds no room, of which `held` have come."""
        if size > (self._bytes_max - self.held + held) // _SHARE:
            raise Overloaded(
                f"bodies of other requests take {self.held - held} of {self._bytes_max} bytes, and this one has over "
                f"{size - 1}: try again when some have ended",
                retry_after_ms=_RETRY_AFTER_MS,
            )
