"""The core and the images of its requests: pixels go out once, before the insert, and again when they are wanted."""

from __future__ import annotations

import msgspec
import pytest

from tests.client.core.cores import expected, image, live, request
from tests.client.core.scripted_worker import ScriptedWorker
from zmqengine.errors import BadRequest, ImageWanted, Overloaded, TooLarge, ZmqEngineError
from zmqengine.protocol.messages import Image, Insert
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.prompt_image import WANTED_MAX


def kinds(network) -> list[str]:  # type: ignore[no-untyped-def]
    """The commands about images and inserts that the worker got, in order."""
    return [type(one).__name__ for one in network.worker.received if isinstance(one, (Image, Insert))]


def run(network, one) -> None:  # type: ignore[no-untyped-def]
    """Start a request and see it to its end."""
    network.worker.received.clear()
    network.session.start_request(one, network.now)
    for _ in range(60):
        network.settle(8)
        network.run_pass()


def test_a_fresh_image_and_its_insert_go_out_together() -> None:
    """Without a question first: one round trip."""
    network = live()
    one = request(images=[image(b"a"), image(b"b", 2)])
    run(network, one)
    assert kinds(network) == ["Image", "Image", "Insert"]
    assert one.tokens == expected(one)
    assert all(each.body is None for each in one.images), "pixels are not kept once they are sent"


def test_an_image_that_the_worker_has_is_not_sent_again() -> None:
    """The next turn of a conversation, and further choices of one prompt."""
    network = live()
    shared = [image(b"a")]
    run(network, request("r1", images=shared))
    network.worker.received.clear()
    run(network, request("r2", images=shared))
    run(network, request("r3", images=[image(b"a", fresh=False)]))
    assert kinds(network) == ["Insert"]


def test_only_what_is_wanted_is_made_and_sent() -> None:
    """The insert comes first, then the missing image and the insert again."""
    network = live()
    run(network, request("r1", images=[image(b"a")]))
    made = []
    old, other = image(b"a", fresh=False), image(b"b", 2, fresh=False)
    old.make = lambda: made.append("a") or ImageBody.of(b"a")  # type: ignore[func-returns-value]
    one = request("r2", images=[old, other])
    run(network, one)
    assert kinds(network) == ["Insert", "Image", "Insert"]
    assert made == []
    assert one.tokens == expected(one)


def test_a_restarted_worker_gets_the_images_again() -> None:
    """The stream goes on at its next token."""
    network = live()
    one = request(max_tokens=40, ignore_eos=True, images=[image(b"a")])
    network.session.start_request(one, network.now)
    network.settle()
    network.run_pass()
    network.settle()
    have = len(one.tokens)
    assert have
    network.kill()
    network.worker = ScriptedWorker(epoch=2)
    for _ in range(60):
        network.wait(0.2)
        network.settle(8)
        network.run_pass()
    assert kinds(network) == ["Insert", "Image", "Insert"]
    assert one.tokens == expected(one)
    assert one.resumed == 1


def test_a_worker_without_room_ends_the_request_after_a_few_rounds() -> None:
    """Else two requests could evict each other's images for ever."""
    network = live()
    network.worker.images_room = 1
    one = request(images=[image(b"a"), image(b"b", 2)])
    run(network, one)
    assert isinstance(one.error, ImageWanted)
    assert "2 images" in one.error.message
    assert kinds(network).count("Insert") == WANTED_MAX + 1


def test_a_refusal_of_pixels_is_the_requests() -> None:
    """Overloaded for pixels is overloaded for the request; its insert's own answer comes too late to matter."""
    network = live()
    network.worker.refuse.append((Image, "overloaded"))
    one = request(images=[image(b"a")])
    run(network, one)
    assert isinstance(one.error, Overloaded)
    assert one.error.retry_after_ms == 20


def test_pixels_that_cannot_be_made_end_the_request() -> None:
    """With the reason."""
    network = live()
    one = request(images=[image(b"a", fresh=False)])
    network.session.start_request(one, network.now)
    for _ in range(8):
        network.serve("cmd")
        network.deliver("cmd")
        network.wait(0.0)
        if network.making:
            break
    network.session.pixels_made(network.making.popleft(), [], ZmqEngineError("no memory"), network.now)
    assert one.error.message == "no memory"


def test_an_abort_while_pixels_are_made_is_an_abort() -> None:
    """And nothing is sent any more."""
    network = live()
    one = request(images=[image(b"a", fresh=False)])
    network.session.start_request(one, network.now)
    while not network.making:
        network.serve("cmd")
        network.deliver("cmd")
        network.wait(0.0)
    network.session.abort_request(one, network.now)
    network.settle()
    assert one.end.finish == "abort"
    assert "Image" not in kinds(network)


def test_what_the_worker_would_refuse_is_refused_here() -> None:
    """Too many images, images for a model that sees none, an image that is longer than a message may be."""
    network = live()
    many = request("r1", [5] * 9, images=[image(b"%d" % at, at) for at in range(1, 5)])
    run(network, many)
    assert isinstance(many.error, BadRequest)
    assert "4, the worker takes 3" in many.error.message
    long = request("r2", images=[image(bytes(9000))])
    run(network, long)
    assert isinstance(long.error, TooLarge)
    blind = live()
    blind.kill()
    blind.worker = ScriptedWorker(epoch=2)
    blind.worker.limits = msgspec.structs.replace(blind.worker.limits, images_max=0)
    one = request("r3", images=[image(b"a")])
    blind.session.start_request(one, blind.now)
    for _ in range(30):
        blind.wait(0.2)
        blind.settle(8)
    assert isinstance(one.error, BadRequest)
    assert "sees no images" in one.error.message
    assert kinds(blind) == []


def test_a_worker_that_hangs_is_sent_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of further requests are made again when it asks for them: no memory holds those of a flood."""
    monkeypatch.setattr("zmqengine_client.core.inserting.IMAGE_BYTES_MAX", 8000)
    network = live()
    network.worker.received.clear()
    many = [request(f"r{at}", images=[image(bytes([at]) * 1000)]) for at in range(30)]
    for one in many:
        network.session.start_request(one, network.now)
        network.carry_out()
    assert sum(len(body) for _, body in network.up["cmd"]) < 8000 + 1000 + 30 * 400
    assert all(each.body is None for one in many for each in one.images)
    for _ in range(200):
        network.settle(8)
        network.run_pass()
    assert [one.tokens for one in many] == [expected(one) for one in many]
    assert kinds(network).count("Image") == 30


@pytest.mark.parametrize("room", [2, 3])
def test_two_requests_share_a_small_store(room: int) -> None:
    """Both end, with their tokens, when their images fit beside each other."""
    network = live()
    network.worker.images_room = room
    both = [request("r1", images=[image(b"a")]), request("r2", [6, 7, 8], images=[image(b"b")])]
    for one in both:
        network.session.start_request(one, network.now)
    for _ in range(60):
        network.settle(8)
        network.run_pass()
    assert [one.tokens for one in both] == [expected(one) for one in both]
