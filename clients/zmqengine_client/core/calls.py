"""Commands that wait for their reply, and acknowledgements of ended requests, sent in batches.

Every command is idempotent, so one without a reply is sent again as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf

from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import Ack, Command, Image
from zmqengine_client.core.outbox import Frames, Outbox, Send
from zmqengine_client.core.request import Request

RETRY_S = 1.0
RETRY_MAX_S = 4.0
ACK_WAIT_S = 0.05
"""Seconds in which acknowledgements are collected: each message wakes the worker and this process once more. Until
then the worker holds the output of requests, and drops delivered ones by itself where their bytes or number end."""
ACK_BATCH_MAX = 64
ACK_MESSAGE_MAX = 4096


class CommandCall:
    """A command without a reply yet. `request`: the request that it concerns."""

    __slots__ = ("frames", "give_up_at", "id", "kind", "request", "retries", "retry_at", "sent_at", "wait_s")

    def __init__(
        self,
        id_: int,
        kind: type[Command],
        frames: Frames,
        request: Request | None,
        now: float,
        give_up_s: float,
    ) -> None:
        self.id = id_
        self.kind = kind
        self.frames = frames
        self.request = request
        self.retries = 0
        self.sent_at = now
        self.wait_s = RETRY_S
        self.retry_at = now + RETRY_S
        self.give_up_at = now + give_up_s


class CallTable:
    """The commands of one connection to cmd, sent through `outbox`."""

    def __init__(self, outbox: Outbox, *, give_up_s: float) -> None:
        self.outbox = outbox
        self._give_up_s = give_up_s
        self._ids = count(1)
        self._calls: dict[int, CommandCall] = {}
        # A lower bound, so that an answered call does not cost a scan.
        self._due_at = inf
        self.last_sent_at = 0.0

    def send(self, make: Callable[[int], Command], now: float, request: Request | None = None) -> CommandCall:
        """Send the command that `make` builds for its call id, and keep it until it is answered."""
        call = self.prepare(make, now, request)
        self.start(call, now)
        return call

    def prepare(self, make: Callable[[int], Command], now: float, request: Request | None) -> CommandCall:
        """An encoded command that is not sent yet, so that its size can be checked."""
        call_id = next(self._ids)
        command = make(call_id)
        return CommandCall(call_id, type(command), encode(command), request, now, self._give_up_s)

    def prepare_image(self, make: Callable[[int], Frames], now: float, request: Request) -> CommandCall:
        """The command that has an image, whose frames `make` builds for its call id; not sent yet."""
        call_id = next(self._ids)
        return CommandCall(call_id, Image, make(call_id), request, now, self._give_up_s)

    def start(self, call: CommandCall, now: float) -> None:
        """Send a prepared command."""
        self._calls[call.id] = call
        self._due_at = min(self._due_at, call.retry_at, call.give_up_at)
        self._put(call, now)

    def answered(self, call_id: int) -> CommandCall | None:
        """The call that this reply answers; None if it was answered before or belongs to an earlier connection."""
        return self._calls.pop(call_id, None)

    @property
    def image_bytes(self) -> int:
        """Bytes of the images that the worker has not answered yet."""
        return sum(len(call.frames[1]) for call in self._calls.values() if call.kind is Image)

    def waiting_since(self) -> float | None:
        """The time at which the oldest call without a reply was first sent."""
        return next(iter(self._calls.values())).sent_at if self._calls else None

    def advance(self, now: float) -> list[CommandCall]:
        """Repeat the calls that are due; returns those given up."""
        if now < self._due_at:
            return []
        given_up = []
        self._due_at = inf
        for call in list(self._calls.values()):
            if now >= call.give_up_at:
                given_up.append(self._calls.pop(call.id))
                continue
            if now >= call.retry_at:
                call.retries += 1
                call.wait_s = min(RETRY_MAX_S, call.wait_s * 2)
                call.retry_at = now + call.wait_s
                self.outbox.counters.command_retries += 1
                self._put(call, now)
            self._due_at = min(self._due_at, call.retry_at, call.give_up_at)
        return given_up

    def next_deadline(self) -> float:
        """The earliest time at which `advance` has something to do."""
        return self._due_at if self._calls else inf

    def clear(self) -> None:
        """Forget all calls: the connection they were sent on is gone."""
        self._calls.clear()
        self._due_at = inf

    def _put(self, call: CommandCall, now: float) -> None:
        self.last_sent_at = now
        self.outbox.actions.append(Send("cmd", call.frames))


class Acknowledgements:
    """Ids of requests received whole, which the worker may forget: collected for `ACK_WAIT_S`, sent together."""

    def __init__(self, calls: CallTable) -> None:
        self._calls = calls
        self._ids: dict[str, None] = {}
        self.due_at = inf

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str, now: float) -> None:
        """Acknowledge this one with the next batch."""
        self._ids[request_id] = None
        self.due_at = now if len(self._ids) >= ACK_BATCH_MAX else min(self.due_at, now + ACK_WAIT_S)

    def advance(self, now: float) -> None:
        """Send the batch if it is due."""
        if now >= self.due_at:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Send the batch."""
        ids = list(self._ids)
        self.clear()
        for start in range(0, len(ids), ACK_MESSAGE_MAX):
            part = ids[start : start + ACK_MESSAGE_MAX]
            self._calls.send(lambda call, part=part: Ack(call, part), now)  # type: ignore[misc]

    def clear(self) -> None:
        """Drop all ids: their session is gone."""
        self._ids.clear()
        self.due_at = inf
