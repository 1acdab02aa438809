"""Work on images that a thread does, by name."""

from __future__ import annotations

import re
from types import FrameType
from typing import Any

_FILES = re.compile(
    r"/(?:PIL|numpy)/|/base64\.py$|zmqengine_client/images/(?:decoding|preparing|sizes|sources)\.py$"
)
_COPIED_BYTES = 16 * 1024


class ThreadWork:
    """A profile function: the functions of Pillow, numpy, base64 and our decoding that its thread called, and the
    lengths of messages that it copied."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        self.calls += 1
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if _FILES.search(file):
            self.found.add(f"{file}:{name}")
        elif name == "send" and "/zmq/" in file:
            given = frame.f_locals
            if given["copy"] and len(given["data"]) > _COPIED_BYTES:
                self.found.add(f"a copy of {len(given['data'])} bytes")
