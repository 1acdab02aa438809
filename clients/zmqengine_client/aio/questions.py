"""Calls on ctl, and the wait for their replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import ControlReply, ControlRequest, Description
from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.waiting import AsyncNotifier
from zmqengine_client.core.control import ControlCall

ReplyT = TypeVar("ReplyT", bound=ControlReply)


class AsyncQuestions:
    """Sends the ctl call that `make` builds from a call id. Raises the worker's error, or a timeout."""

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver

    async def ask(self, make: Callable[[int], ControlRequest], kind: type[ReplyT]) -> ReplyT:
        reply = await self.tell(make)
        if not isinstance(reply, kind):
            raise ZmqEngineError(f"the worker answered with {type(reply).__name__}, not {kind.__name__}")
        return reply

    async def tell(
        self, make: Callable[[int], ControlRequest], timeout_s: float | None = None
    ) -> ControlReply:
        """Wait for a reply of any kind: the command has been carried out."""
        return await self._call(make, timeout_s)

    async def wait_ready(self, timeout_s: float | None) -> Description:
        """The description of a worker that takes requests."""
        reply = await self._call(None, timeout_s)
        assert isinstance(reply, Description)
        return reply

    async def _call(
        self, make: Callable[[int], ControlRequest] | None, timeout_s: float | None
    ) -> ControlReply:
        self._driver.check_waiting()
        notifier = AsyncNotifier()
        call = ControlCall(make, notifier, timeout_s)
        self._driver.post(lambda now: self._driver.session.start_control(call, now))
        while not call.done:
            # A closed client drops its calls without an answer.
            self._driver.check_waiting()
            await notifier.mailbox.wait()
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result
