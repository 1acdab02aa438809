"""Host memory of the constraints of live requests, within a bound."""

from __future__ import annotations

import threading
import weakref

from zmqengine.errors import NeverFits, Overloaded


class ConstraintClaim:
    """Memory of one compiled constraint, counted for as long as this object lives."""

    __slots__ = ("__weakref__", "bytes")

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_


class ConstraintMemory:
    """Bytes that compiled constraints take, and those by which the heap has grown since there were any.

    llguidance does not tell how much memory a parser takes. The trial of a constraint measures it as compiled; how far
    it grows while it follows an output is known only for all together. `bytes_max` bounds both. Any thread may claim;
    the rest is the actor's.
    """

    def __init__(self) -> None:
        self.bytes_max = 0
        self._claims = weakref.WeakSet[ConstraintClaim]()
        self._claiming = threading.Lock()
        self._heap_bytes = self._grown_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes in use: as compiled, or as the heap has grown since, whichever is more."""
        return max(self._claimed_bytes, self._grown_bytes)

    def claim(self, bytes_: int) -> ConstraintClaim:
        """Room for a constraint. Raises `NeverFits` or `Overloaded` with the numbers."""
        if bytes_ > self.bytes_max:
            raise NeverFits(
                f"constraint: it takes {bytes_} bytes when compiled, the worker has {self.bytes_max} for constraints: "
                "use a simpler one or raise --memory-limit"
            )
        with self._claiming:
            if self.bytes + bytes_ > self.bytes_max:
                raise Overloaded(
                    f"constraint: it takes {bytes_} bytes when compiled; those of other requests take {self.bytes} of "
                    f"the {self.bytes_max} that the worker has for them: try again once some have ended"
                )
            claim = ConstraintClaim(bytes_)
            self._claims.add(claim)
            return claim

    def observe(self, heap_bytes: int) -> None:
        """Note the bytes of the heap without the engine's arrays: what they grow by while there are constraints counts
        as theirs."""
        if not self._claims:
            self._heap_bytes = heap_bytes
        self._grown_bytes = max(0, heap_bytes - self._heap_bytes)

    def limit_growth(self, bytes_: int) -> None:
        """Count at most `bytes_` of the growth so far, the most that the constraints can take; the rest has other
        causes."""
        self._heap_bytes += max(0, self._grown_bytes - bytes_)
        self._grown_bytes = min(self._grown_bytes, bytes_)

    @property
    def _claimed_bytes(self) -> int:
        return sum(claim.bytes for claim in self._claims)
