"""Sessions and requests for tests of the core."""

from __future__ import annotations

from typing import Any

from tests.client.core.scripted_worker import CTL, Network, ScriptedWorker, expected_output
from zmqengine.protocol.messages import ImageRef
from zmqengine.vision_card import image_hash
from zmqengine_client.core.calls import ACK_WAIT_S
from zmqengine_client.core.connection import SessionConfig
from zmqengine_client.core.options import make_options
from zmqengine_client.core.request import Request
from zmqengine_client.core.session import ClientSession
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.prompt_image import PromptImage


def session(**options: Any) -> ClientSession:
    """A session core with a fixed secret."""
    options = {"is_absent": lambda address: False, **options}
    return ClientSession(SessionConfig(address=CTL, name="test", session_secret=b"s" * 32, **options))


def request(name: str = "r1", prompt: list[int] | None = None, **options: Any) -> Request:
    """A request with a known seed."""
    images = options.pop("images", ())
    options = {"request_id": name, "seed": 7, "max_tokens": 20, **options}
    return Request(prompt or [5, 6, 7], make_options(options), images=images)  # type: ignore[arg-type]


def image(contents: bytes, at: int = 1, *, fresh: bool = True) -> PromptImage:
    """An image of one token; `fresh` if its pixels were not sent yet."""
    ref = ImageRef(image_hash("test", [(1, 1)], contents), at, 1, [(1, 1)])
    return PromptImage(ref, lambda: ImageBody.of(contents), ImageBody.of(contents) if fresh else None)


def expected(request: Request) -> list[int]:
    """The output it must get."""
    stops = set(request.options.stop_token_ids) | (set() if request.options.ignore_eos else {0})
    return expected_output(request.prompt, request.seed, request.max_tokens, stops)


def live(**options: Any) -> Network:
    """A network whose session is live."""
    network = Network(session(**options), ScriptedWorker())
    opener = request("opener", max_tokens=1)
    network.session.start_request(opener, network.now)
    network.settle()
    network.run_pass()
    network.settle()
    network.wait(2 * ACK_WAIT_S)
    network.settle()
    assert network.session.connection.phase.value == "live"
    assert opener.end is not None
    assert network.worker is not None
    assert not network.worker.requests(), "the opener was not acknowledged"
    return network
