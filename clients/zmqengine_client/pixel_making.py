"""Pixels of images, made in a thread when the core asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from zmqengine.errors import ZmqEngineError
from zmqengine_client.core.outbox import Action, MakePixels
from zmqengine_client.core.session import ClientSession
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.threads import IMAGE_THREADS

Post = Callable[[Callable[[float], None]], None]
"""Has a command called with the time in the thread of the session, soon. Called from any thread."""


def make_pixels(actions: Sequence[Action], session: ClientSession, post: Post) -> None:
    """Carry out the actions that make pixels; what they made is posted to the session."""
    for action in actions:
        if isinstance(action, MakePixels):
            _begin(action, session, post)


def _begin(action: MakePixels, session: ClientSession, post: Post) -> None:
    def done(future: Future[list[ImageBody]]) -> None:
        failure = future.exception()
        bodies = [] if failure is not None else future.result()
        error = failure if isinstance(failure, ZmqEngineError) else None
        if failure is not None and error is None:
            error = ZmqEngineError(f"an image cannot be prepared again: {failure}")
        post(lambda now: session.pixels_made(action, bodies, error, now))

    IMAGE_THREADS.submit(lambda: [image.make() for image in action.images]).add_done_callback(done)
