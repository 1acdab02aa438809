"""The body of an image's message, made where its pixels are: tens of megabytes are not copied to be sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine.protocol.messages import MAGIC, CacheScope, Image

HEAD_BYTES_MAX = 4096
"""Room for the rest of the message: its 256 grids at most have 2 KiB."""


class ImageBody:
    """Pixels of an image, of `size` bytes, behind room for what precedes them in a message.

    Pixels are written before `frames` and never after. `frames` is called once: frames that are still to be sent are
    in the same memory.
    """

    __slots__ = ("_bytes",)

    def __init__(self, size: int) -> None:
        import numpy as np

        # A bytearray would be zeroed while Python's other threads wait.
        self._bytes = np.empty(HEAD_BYTES_MAX + size, np.uint8)

    @classmethod
    def of(cls, pixels: bytes | memoryview) -> ImageBody:
        """A copy of these pixels."""
        import numpy as np

        body = cls(len(pixels))
        body._bytes[HEAD_BYTES_MAX:] = np.frombuffer(pixels, np.uint8)
        return body

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with the room before the pixels."""
        return self._bytes.nbytes

    @property
    def pixels(self) -> memoryview:
        return self._bytes.data[HEAD_BYTES_MAX:]

    def frames(
        self,
        call: int,
        epoch: bytes,
        hash_: bytes,
        grids: Sequence[tuple[int, int]],
        cache_scope: CacheScope | None,
        cache_salt: str = "",
    ) -> tuple[bytes, memoryview]:
        """The header and body frames of the message."""
        fields = {
            "call": call, "epoch": epoch, "hash": hash_, "grids": grids, "cache_scope": cache_scope,
            "cache_salt": cache_salt, "pixels": b"",
        }  # fmt: skip
        # The pixels as a "bin 32" of msgpack, in place of an empty "bin 8".
        head = msgspec.msgpack.encode(fields)[:-2] + b"\xc6" + len(self.pixels).to_bytes(4, "big")
        body = self._bytes.data
        start = HEAD_BYTES_MAX - len(head)
        body[start:HEAD_BYTES_MAX] = head
        return MAGIC + Image.KIND, body[start:]
