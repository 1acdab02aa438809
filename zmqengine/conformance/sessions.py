"""Rules of hello, subscription, takeover and bye."""

from __future__ import annotations

import os
import re

from zmqengine.conformance.front_end import expect
from zmqengine.conformance.rules import Make, rule


@rule("Dialogue", "a command without a session is refused with unknown_session")
def _no_session(make: Make) -> None:
    front_end = make()
    front_end.refused(front_end.command("P"), "unknown_session")
    front_end.refused(front_end.command("A", request="r"), "unknown_session")


@rule("Versions", "hello without a version in common is refused with unsupported_protocol")
def _versions(make: Make) -> None:
    front_end = make()
    front_end.refused(front_end.hello(protocol=[90, 99]), "unsupported_protocol")
    front_end.done(front_end.hello(protocol=[1, 99]), "h")


@rule("H hello", "a secret has 16 to 64 bytes")
def _secrets(make: Make) -> None:
    front_end = make()
    for size in (0, 15, 65):
        front_end.refused(front_end.hello(session_secret=b"x" * size), "bad_request")
    front_end.done(front_end.hello(), "h")


@rule("h welcome", "names a topic that cannot be guessed, the limits and the lease")
def _welcome(make: Make) -> None:
    front_end, other = make().open_session(), make().open_session()
    welcome = front_end.welcome
    expect(re.fullmatch(r"s/[0-9a-f]{32}/", welcome["topic"]), f"the topic is {welcome['topic']!r}")
    expect(welcome["topic"] != other.welcome["topic"], "two sessions have one topic")
    expect(welcome["session"] != other.welcome["session"], "two sessions have one name")
    expect(welcome["epoch"] == front_end.description["epoch"], "welcome has another epoch than describe")
    expect(welcome["lease_ms"] > 0, "the lease is over at once")
    expect(welcome["limits"]["context_tokens_max"] > 0, "there are no limits")


@rule("H hello", "said again on the same connection it gets the same welcome, and another secret bad_request")
def _hello_again(make: Make) -> None:
    front_end = make().open_session()
    again = front_end.done(front_end.hello(), "h")
    expect(again["topic"] == front_end.welcome["topic"], "the topic is another one")
    front_end.refused(front_end.hello(session_secret=os.urandom(32)), "bad_request")


@rule("Dialogue", "insert before the subscription is granted is refused with not_subscribed")
def _not_subscribed(make: Make) -> None:
    front_end = make()
    front_end.welcome = front_end.done(front_end.hello(), "h")
    front_end.refused(front_end.insert("r"), "not_subscribed")


@rule("Dialogue", "a subscription to nothing, to a prefix or to another's topic shows no frame")
def _topics(make: Make) -> None:
    owner = make().open_session()
    spies = []
    for topic in ("", "s/", owner.welcome["topic"][:20]):
        spy = make()
        spy.subscribe(topic)
        spies.append(spy)
    owner.generate("r", max_tokens=20)
    expect(all(spy.is_quiet() for spy in spies), "another connection sees the frames of a session")
    expect(owner.topics == {owner.welcome["topic"].encode()}, "a frame came under another topic")


@rule(
    "H hello",
    "a known secret takes the session over: its requests stay, the topic changes, the old one is fenced",
)
def _take_over(make: Make) -> None:
    before, after = make().open_session(), make()
    before.generate("r", max_tokens=5)
    after.secret = before.secret
    welcome = after.done(after.hello(), "h")
    expect(welcome["topic"] != before.welcome["topic"], "the topic is still the same")
    expect([row[0] for row in welcome["requests"]] == ["r"], "welcome does not name what the session holds")
    before.refused(before.command("P"), "fenced")
    after.subscribe(welcome["topic"])
    expect(after.next_frame()[0] == "g", "the new topic is not granted")
    replay = after.done(after.command("U", request="r", epoch=welcome["epoch"], from_index=0), "u")
    expect(len(replay["row"][2]) == 5, "the output is not kept")


@rule("B bye", "ends what runs and forgets the session")
def _bye(make: Make) -> None:
    front_end = make().open_session()
    front_end.accepted("r", max_tokens=front_end.welcome["limits"]["context_tokens_max"] - 10)
    front_end.done(front_end.command("B"))
    front_end.refused(front_end.command("P"), "unknown_session")
    back = front_end.done(front_end.hello(), "h")
    expect(not back.get("requests"), "what it had is still held")
