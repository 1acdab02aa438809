"""Faults of a fake engine, as its configuration asks for them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Literal, Protocol

import msgspec

from zmqengine.engine.interface import RowRequest

FaultPlace = Literal[
    "insert", "next", "prefill", "token", "remove", "park", "reset", "trim", "stats", "memory", "close"
]
FaultAction = Literal["fail", "raise", "block", "hang", "spin", "exit"]

EXIT_CODE = 86


class FakeEngineError(Exception):
    """A fault that the configuration asked for."""


class FakeFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and its place.

    `token` limits the fault to rows whose prompt holds that token; for `next` it means "while such a row is in
    the engine". `index` limits it to one step (`next`: the first is 0) or one output index (`token`). It strikes
    `times` times, or every time when that is None.

    `fail` ends the row with a RowFailure (at `insert`, `prefill` and `token`); `raise` raises FakeEngineError with
    `message`; `block` waits until `FakeEngine.unblock` is set; `hang` blocks in native code and `spin` runs in native
    code with the interpreter lock held, both for ever; `exit` ends the process at once with EXIT_CODE.
    """

    place: FaultPlace
    action: FaultAction
    token: int | None = None
    index: int | None = None
    times: int | None = 1
    message: str = ""


class FaultyRow(Protocol):
    """A row that a fault may strike."""

    request: RowRequest


class FakeFaults:
    """Lets faults happen where they are due. `unblock` ends every `block`."""

    def __init__(self, faults: Sequence[FakeFault]) -> None:
        self.unblock = threading.Event()
        self._faults = faults
        self._strikes = [0] * len(faults)

    def strike(self, place: FaultPlace, row: FaultyRow | None = None, index: int | None = None) -> bool:
        """Let the faults of this place happen; says whether the row is to fail."""
        for number, fault in enumerate(self._faults):
            if fault.place != place or fault.index not in (None, index):
                continue
            if place == "next" and (fault.token is None) != (row is None):
                continue
            if fault.token is not None and (row is None or fault.token not in row.request.prompt):
                continue
            if fault.times is not None and self._strikes[number] >= fault.times:
                continue
            self._strikes[number] += 1
            if fault.action == "fail":
                return True
            self._act(fault)
        return False

    def _act(self, fault: FakeFault) -> None:
        if fault.action == "exit":
            os._exit(EXIT_CODE)
        if fault.action == "block":
            self.unblock.wait()
            return
        if fault.action == "hang":
            while True:
                ctypes.CDLL(None).pause()
        if fault.action == "spin":
            deque(repeat(None), maxlen=0)
        raise FakeEngineError(fault.message or f"fake fault at {fault.place}")
