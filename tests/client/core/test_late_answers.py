"""Answers that come after what they were for has changed."""

from __future__ import annotations

from tests.client.core.cores import live, request
from zmqengine.protocol.codec import command_decoder, encode
from zmqengine.protocol.messages import Accepted, Insert, Rejected, Resume, TokenFrame, TokenRow
from zmqengine_client.core.phases import RequestPhase


def test_an_insert_that_was_put_off_is_not_sent_again_when_an_earlier_one_is_accepted_after_all() -> None:
    """The worker holds it then: a second insert with other `emitted` would be refused as a conflict."""
    network = live()
    session, epoch = network.session, network.session.connection.epoch
    assert network.topic is not None
    one = request()

    def commands() -> list[object]:
        network.carry_out()
        taken = [command_decoder().decode(frames) for frames in network.up["cmd"]]
        network.up["cmd"].clear()
        return taken  # type: ignore[return-value]

    def publish(first_index: int) -> None:
        frame = TokenFrame(epoch, 0, [TokenRow(one.id, first_index, [5])])
        session.receive("out", [network.topic or b"", *encode(frame)], network.now)

    session.start_request(one, network.now)
    (first,) = commands()
    assert isinstance(first, Insert)
    publish(0)
    publish(2)
    (resume,) = commands()
    assert isinstance(resume, Resume)
    unknown = Rejected(resume.call, epoch, "unknown_request", "no such request")
    session.receive("cmd", encode(unknown), network.now)
    (second,) = commands()
    assert isinstance(second, Insert)
    assert one.phase is RequestPhase.INSERTING
    full = Rejected(second.call, epoch, "overloaded", "the queue is full", retry_after_ms=500)
    session.receive("cmd", encode(full), network.now)
    assert one.phase is RequestPhase.PUT_OFF  # type: ignore[comparison-overlap]
    # The worker is not asked for what comes before this, as for all it knows there is no such request.
    publish(5)
    assert commands() == []
    session.receive("cmd", encode(Accepted(first.call, epoch, one.id, 1, 7, "running")), network.now)
    assert one.phase is RequestPhase.ACCEPTED
    network.wait(0.9)
    assert commands() == []
