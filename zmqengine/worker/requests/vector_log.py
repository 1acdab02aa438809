"""Vector log: the output of one embed, kept until the front-end acknowledges it, to replay it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqengine.protocol.messages import End, TokenRow

if TYPE_CHECKING:
    import numpy as np

TOKEN_FLOATS = 16
"""Floats of a vector that count as one token in a frame: copying them takes as long as encoding a token."""


class VectorLog:
    """Vectors by text index; `sent` is the index of the first one that was not sent yet.

    Vectors before `first_index` were sent in an earlier epoch. `nbytes` counts all `texts` from the start, since the
    size of the output is known.
    """

    __slots__ = ("_count", "_first_index", "_vectors", "nbytes", "sent", "weight")
    kept_from = 0

    def __init__(self, first_index: int, texts: int, width: int) -> None:
        # A worker that makes no vectors may do without.
        import numpy as np

        self._first_index = first_index
        # The system allocates pages of it when they are written.
        self._vectors = np.empty((texts, width), "<f4")
        self._count = 0
        self.sent = first_index
        self.nbytes = self._vectors.nbytes
        self.weight = max(1, width // TOKEN_FLOATS)

    def __len__(self) -> int:
        return self._first_index + self._count

    def append(self, vectors: np.ndarray) -> None:
        """Append the vectors of the next texts."""
        count = len(vectors)
        self._vectors[self._count : self._count + count] = vectors
        self._count += count

    def forget_sent(self) -> int:
        """Drop nothing: returns 0."""
        return 0

    def stop_within(self, start: int, bytes_max: int) -> int:
        """End of the vectors from `start` that fit in `bytes_max` on the wire; at least one, if there is one."""
        return min(len(self), start + max(1, bytes_max // max(1, self._vectors[:1].nbytes)))

    def row(self, request_id: str, start: int, stop: int, end: End | None) -> TokenRow:
        """Vectors [start, stop) in the wire format."""
        known = self._vectors[max(0, start - self._first_index) : max(0, stop - self._first_index)]
        return TokenRow(request_id, start, [], None, end, [vector.tobytes() for vector in known])
