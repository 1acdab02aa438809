"""Images in the actor: sent once, held for who sent them, wanted again when they are gone."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.images import Picture, prompt_of
from tests.support.workers import START_S
from tests.worker.harness import FrontEnd, Harness
from zmqengine.engine.fake.fake_engine import FAKE_CARD, FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine.protocol.messages import Accepted, Done, Message, Rejected
from zmqengine.vision_card import image_hash

CONFIG = FakeEngineConfig(vision=True, prefill_chunk=32, prompt_cache_bytes=1 << 20)
ONE = Picture(FAKE_CARD)
OTHER = Picture(FAKE_CARD, change=77)


def put(front_end: FrontEnd, picture: Picture, scope: str | None = None, salt: str = "") -> Message:
    image = picture.put(front_end.epoch, front_end.next_call(), scope)
    return front_end.call(replace(image, cache_salt=salt))


def insert(front_end: FrontEnd, request: str, *parts: Any, **fields: Any) -> Message:
    prompt, places = prompt_of(*parts)
    return front_end.insert(request, prompt, images=[one.ref(at) for one, at in places], **fields)


def expected(*parts: Any) -> list[int]:
    """The tokens of a request of the harness's defaults."""
    prompt, places = prompt_of(*parts)
    images = [one.row_image(at) for one, at in places]
    return expected_tokens(
        RowRequest(0, prompt, 8, seed=1, images=images, stop_token_ids=frozenset({0})), CONFIG
    )


def test_an_image_that_is_not_held_is_wanted_sent_and_seen(make_harness: Callable[..., Harness]) -> None:
    """The refusal names what to send; the tokens are those of the contents, of two images that differ in one byte."""
    harness = make_harness(CONFIG)
    front_end = harness.front_end()
    parts = ([5, 6], ONE, [7], OTHER, [8])
    refusal = insert(front_end, "r", *parts)
    assert isinstance(refusal, Rejected)
    assert (refusal.code, set(refusal.wanted)) == ("image_wanted", {ONE.hash, OTHER.hash})
    assert isinstance(put(front_end, ONE), Done)
    refusal = insert(front_end, "r", *parts)
    assert isinstance(refusal, Rejected)
    assert refusal.wanted == [OTHER.hash]
    for _ in range(2):
        assert isinstance(put(front_end, OTHER), Done)
    assert isinstance(insert(front_end, "r", *parts), Accepted)
    assert isinstance(insert(front_end, "r", *parts), Accepted), "the same insert again"
    insert(front_end, "swapped", [5, 6], OTHER, [7], ONE, [8])
    front_end.wait_for_end("r", "swapped")
    assert front_end.tokens["r"] == expected(*parts)
    assert front_end.tokens["swapped"] == expected([5, 6], OTHER, [7], ONE, [8]) != front_end.tokens["r"]
    assert harness.actor.lifecycle.image_numbers() == {
        "images": 2, "image_pixels_bytes": len(ONE.pixels) + len(OTHER.pixels),
    }  # fmt: skip


class GatedHash:
    """The hash of an image, computed once the gate is open; `threads` are those that computed one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []
        monkeypatch.setattr("zmqengine.worker.requests.images.image_hash", self)

    def __call__(self, *named: Any) -> bytes:
        assert self.gate.wait(START_S)
        self.threads.append(threading.current_thread())
        return image_hash(*named)


def test_no_pass_touches_the_pixels_of_an_image(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither copied nor hashed on the actor's thread: rows make tokens, and other commands are answered,
    while the hash is computed. What names the image waits for that, in order."""
    hashed = GatedHash(monkeypatch)
    large = Picture(FAKE_CARD, ((32, 32),))
    harness = make_harness(CONFIG)
    front_end = harness.front_end()
    front_end.accepted("text", max_tokens=400, ignore_eos=True)
    harness.passes(3)
    prompt, ((_, at),) = prompt_of([5], large, [6])
    sent = large.put(front_end.epoch, front_end.next_call())
    inserted = front_end.insert_message("sees", prompt, images=[large.ref(at)])
    aborted = front_end.insert_message("aborted", prompt, images=[large.ref(at)])
    front_end.send(sent)
    tracemalloc.start()
    harness.read_commands(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(large.pixels) // 2, "no copy of the pixels"
    front_end.send(inserted)
    front_end.send(aborted)
    harness.read_commands(2)
    assert isinstance(front_end.abort("aborted"), Done)
    assert isinstance(front_end.insert("other"), Accepted)
    made = len(front_end.tokens["text"])
    harness.run_until(lambda: front_end.read() or len(front_end.tokens["text"]) > made + 5)
    assert not hashed.threads
    seen = len(front_end.replies)
    hashed.gate.set()
    harness.run_until(lambda: front_end.read() or len(front_end.replies) == seen + 3)
    first, second, third = front_end.replies[seen:]
    assert isinstance(first, Done)
    assert isinstance(second, Accepted)
    assert isinstance(third, Rejected)
    assert [first.call, second.call, third.call] == [sent.call, inserted.call, aborted.call]
    assert third.code == "aborted"
    assert threading.current_thread() not in hashed.threads
    assert len(hashed.threads) == 1
    front_end.wait_for_end("sees")
    assert front_end.tokens["sees"] == expected([5], large, [6])


def test_a_wrong_image_costs_another_front_end_of_its_scope_no_request(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both send one hash: the first, with other pixels, is refused, and the other's insert wants the image again.
    Beyond `queue_max` none waits for one image."""
    hashed = GatedHash(monkeypatch)
    harness = make_harness(CONFIG, queue_max=2)
    wrong, right = harness.front_end(), harness.front_end()
    forged = msgspec.structs.replace(ONE.put(wrong.epoch, 70), pixels=memoryview(OTHER.pixels))
    prompt, ((_, at),) = prompt_of([5], ONE, [6])
    waiting = [
        ONE.put(right.epoch, right.next_call()),
        right.insert_message("r", prompt, images=[ONE.ref(at)]),
        right.insert_message("one too many", prompt, images=[ONE.ref(at)]),
    ]
    wrong.send(forged)
    harness.read_commands(1)
    for message in waiting:
        right.send(message)
    full = right.next_reply()
    assert isinstance(full, Rejected)
    assert (full.request, full.code) == ("one too many", "overloaded")
    hashed.gate.set()
    refused = wrong.next_reply()
    assert isinstance(refused, Rejected)
    assert (refused.call, refused.code) == (70, "bad_request")
    assert harness.actor.lifecycle.image_numbers() == {"images": 0, "image_pixels_bytes": 0}
    seen = right.replies.index(full) + 1
    harness.run_until(lambda: right.read() or len(right.replies) == seen + 2)
    done, wanted = right.replies[seen:]
    assert isinstance(done, Done)
    assert isinstance(wanted, Rejected)
    assert wanted.wanted == [ONE.hash]
    assert isinstance(put(right, ONE), Done)
    assert isinstance(insert(right, "r", [5], ONE, [6]), Accepted)
    assert len(hashed.threads) == 2


@pytest.mark.parametrize("scope", ["session", "key", None])
def test_to_know_a_hash_is_not_to_see_an_image(
    scope: str | None, make_harness: Callable[..., Harness]
) -> None:
    """Another session wants it for its own scope; in the shared one it is there for all."""
    harness = make_harness(CONFIG)
    first, second = harness.front_end(), harness.front_end()
    put(first, ONE, scope)
    reply = insert(second, "r", [5], ONE, [6], cache_scope=scope)
    assert isinstance(reply, Accepted if scope is None else Rejected)
    assert isinstance(insert(first, "r", [5], ONE, [6], cache_scope=scope), Accepted)


@pytest.mark.parametrize("scope", ["session", "key", "shared"])
def test_a_salt_parts_the_images_of_one_session(scope: str, make_harness: Callable[..., Harness]) -> None:
    """A front-end keeps its own callers apart; what is shared has no parts."""
    front_end = make_harness(CONFIG).front_end()
    put(front_end, ONE, scope, salt="first")
    reply = insert(front_end, "r", [5], ONE, [6], cache_scope=scope, cache_salt="other")
    assert isinstance(reply, Accepted if scope == "shared" else Rejected)
    assert isinstance(insert(front_end, "s", [5], ONE, [6], cache_scope=scope, cache_salt="first"), Accepted)


def test_images_in_use_stay_and_others_give_way(make_harness: Callable[..., Harness]) -> None:
    """The least recently used go; with all of them in use a new one is put off, until a request ends."""
    pictures = [Picture(FAKE_CARD, seed=seed) for seed in range(4)]
    size = len(pictures[0].pixels)
    config = FakeEngineConfig(vision=True, kv_bytes_token=8)
    harness = make_harness(config, memory_limit_bytes=16 * (3 * size + size // 2))
    front_end = harness.front_end()
    for picture in pictures[:3]:
        put(front_end, picture)
    assert isinstance(insert(front_end, "a", [5], pictures[0], pictures[1], max_tokens=500), Accepted)
    assert isinstance(put(front_end, pictures[3]), Done)
    refusal = insert(front_end, "b", [5], pictures[2])
    assert isinstance(refusal, Rejected)
    assert refusal.wanted == [pictures[2].hash]
    assert isinstance(insert(front_end, "c", [5], pictures[3], max_tokens=500), Accepted)
    refusal = put(front_end, pictures[2])
    assert isinstance(refusal, Rejected)
    assert (refusal.code, refusal.retry_after_ms is None) == ("overloaded", False)
    too_many = insert(front_end, "d", [5], *pictures)
    assert isinstance(too_many, Rejected)
    assert too_many.code == "never_fits"
    front_end.abort("a")
    assert isinstance(put(front_end, pictures[2]), Done)
    assert harness.actor.lifecycle.images is not None
    assert harness.actor.lifecycle.images.bytes <= 3 * size


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pixels": ONE.pixels[:-1]}, "the grids have 1152"),
        ({"pixels": OTHER.pixels}, "hash"),
        ({"grids": [(6, 4)]}, "hash"),
        ({"grids": [(3, 8)]}, "multiples of 2"),
        ({"grids": [(2000, 2000)]}, "the worker takes 1024 (16384 pixels)"),
        ({"grids": []}, "grids"),
        ({"grids": [(0, 4)]}, "grids"),
        ({"pixels": b""}, "pixels"),
    ],
)
def test_an_image_that_is_not_what_it_says_is_refused(
    change: dict[str, Any], reason: str, make_harness: Callable[..., Harness]
) -> None:
    """By name, and nothing of it is held."""
    harness = make_harness(CONFIG)
    front_end = harness.front_end()
    reply = front_end.call(msgspec.structs.replace(ONE.put(front_end.epoch), **change))
    assert isinstance(reply, Rejected)
    assert reply.code == "bad_request"
    assert reason in reply.message
    assert harness.actor.lifecycle.image_numbers()["images"] == 0


@pytest.mark.parametrize(
    ("at", "tokens", "reason"),
    [(0, 8, "has 5 tokens"), (2, 9, "within the prompt"), (1, 7, "has 5 tokens"), (-1, 8, "at")],
)
def test_a_span_that_does_not_fit_is_refused(
    at: int, tokens: int, reason: str, make_harness: Callable[..., Harness]
) -> None:
    """Its features and the grids' agree, and spans are apart and within the prompt."""
    harness = make_harness(CONFIG)
    front_end = harness.front_end()
    put(front_end, ONE)
    ref = msgspec.structs.replace(ONE.ref(2), at=at, tokens=tokens)
    reply = front_end.insert("r", [5, 6, *ONE.ids], images=[ref])
    assert isinstance(reply, Rejected)
    assert reply.code == "bad_request"
    assert reason in reply.message
    twice = front_end.insert("r", [5, 6, *ONE.ids], images=[ONE.ref(2), ONE.ref(2)])
    assert isinstance(twice, Rejected)
    assert "spans are in order" in twice.message


def test_a_model_that_sees_nothing_says_so(make_harness: Callable[..., Harness]) -> None:
    """By its name, for an image and for a request with one."""
    front_end = make_harness(FakeEngineConfig(name="blind")).front_end()
    for reply in (put(front_end, ONE), insert(front_end, "r", [5], ONE)):
        assert isinstance(reply, Rejected)
        assert reply.code == "bad_request"
        assert "blind sees no images" in reply.message


def test_parked_failed_and_resumed_rows_see_the_same(make_harness: Callable[..., Harness]) -> None:
    """A failed step and a preemption cost no token; `emitted` goes on as it would have."""
    faults = (FakeFault(place="next", action="raise", index=6),)
    config = FakeEngineConfig(
        vision=True, prefill_chunk=8, rows_max=1, prompt_cache_bytes=1 << 20, faults=faults
    )
    harness = make_harness(config)
    front_end = harness.front_end()
    put(front_end, ONE)
    insert(front_end, "slow", [5], ONE, [6], priority=1)
    harness.run_until(lambda: harness.actor.scheduler.running)
    harness.passes(2)
    insert(front_end, "quick", [9], ONE, [6])
    front_end.wait_for_end("slow", "quick")
    assert harness.actor.counters.parked + harness.actor.counters.engine_failures >= 2
    assert front_end.tokens["slow"] == expected([5], ONE, [6])
    assert front_end.tokens["quick"] == expected([9], ONE, [6])
    whole = expected([5], ONE, [6])
    front_end.tokens["again"] = whole[:3]
    insert(front_end, "again", [5], ONE, [6], emitted=whole[:3])
    front_end.wait_for_end("again")
    assert front_end.tokens["again"] == whole
    assert harness.actor.lifecycle.images is not None
    assert not any(held.users for held in harness.actor.lifecycle.images._held.values())


def test_the_prefix_cache_knows_images_by_their_contents(make_harness: Callable[..., Harness]) -> None:
    """The next turn about the same image is cached, the same words about another one are not."""
    harness = make_harness(CONFIG)
    front_end = harness.front_end()
    put(front_end, ONE)
    put(front_end, OTHER)
    insert(front_end, "first", [5], ONE, [6])
    (first,) = front_end.wait_for_end("first")
    insert(front_end, "next", [5], ONE, [6], [*front_end.tokens["first"], 7])
    insert(front_end, "other", [5], OTHER, [6])
    following, other = front_end.wait_for_end("next", "other")
    assert first.cached_tokens == other.cached_tokens == 0
    assert following.cached_tokens >= len(ONE.ids) + 2
