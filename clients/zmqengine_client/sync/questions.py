# Made from ../aio/questions.py by `python -m tools`: change that one.
"""Calls on ctl, and the wait for their replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import ControlReply, ControlRequest, Description
from zmqengine_client.core.control import ControlCall
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.waiting import Notifier

ReplyT = TypeVar("ReplyT", bound=ControlReply)


class Questions:
    """Sends the ctl call that `make` builds from a call id. Raises the worker's error, or a timeout."""

    def __init__(self, driver: IoThread) -> None:
        self._driver = driver

    def ask(self, make: Callable[[int], ControlRequest], kind: type[ReplyT]) -> ReplyT:
        reply = self.tell(make)
        if not isinstance(reply, kind):
            raise ZmqEngineError(f"the worker answered with {type(reply).__name__}, not {kind.__name__}")
        return reply

    def tell(self, make: Callable[[int], ControlRequest], timeout_s: float | None = None) -> ControlReply:
        """Wait for a reply of any kind: the command has been carried out."""
        return self._call(make, timeout_s)

    def wait_ready(self, timeout_s: float | None) -> Description:
        """The description of a worker that takes requests."""
        reply = self._call(None, timeout_s)
        assert isinstance(reply, Description)
        return reply

    def _call(self, make: Callable[[int], ControlRequest] | None, timeout_s: float | None) -> ControlReply:
        self._driver.check_waiting()
        notifier = Notifier()
        call = ControlCall(make, notifier, timeout_s)
        self._driver.post(lambda now: self._driver.session.start_control(call, now))
        while not call.done:
            # A closed client drops its calls without an answer.
            self._driver.check_waiting()
            notifier.mailbox.wait()
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result
