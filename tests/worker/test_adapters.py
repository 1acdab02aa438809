"""Adapters that come and go while requests run, within the memory that there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.adapters import write_opaque_adapter
from tests.worker.harness import Harness
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine.protocol.messages import Done, Message, ModelCard, Rejected
from zmqengine.worker.telemetry.shared_status import AdapterCall

Make = Callable[..., Harness]
PROMPT = (5, 6, 7)
_calls = itertools.count(1)


def answers_of(harness: Harness, *calls: AdapterCall) -> list[Message]:
    """The replies to operators' requests, as the control thread hands them over."""
    answers = harness.shared_status.answers
    for call in calls:
        harness.shared_status.ask_actor(call)
    harness.run_until(lambda: len(answers) == len(calls))
    replies = [reply for route, reply in answers if route == b"operator"]
    answers.clear()
    return list(replies)


def load(harness: Harness, name: str, directory: str) -> Message:
    (reply,) = answers_of(harness, AdapterCall(b"operator", next(_calls), name, directory))
    return reply


def unload(harness: Harness, name: str) -> Message:
    (reply,) = answers_of(harness, AdapterCall(b"operator", next(_calls), name, None))
    return reply


def refused(reply: Message) -> tuple[str, str]:
    assert isinstance(reply, Rejected), reply
    return reply.code, reply.message


def expected(adapter: str, max_tokens: int) -> list[int]:
    return expected_tokens(RowRequest(0, PROMPT, max_tokens, seed=1, adapter=adapter))


def card_of(harness: Harness) -> None:
    """A card, as a worker that is ready has it."""
    harness.shared_status.model = ModelCard("fake", 1000, 4096, [0], "", 0)


def test_requests_that_run_go_on_while_adapters_come_and_go(harness: Harness, tmp_path: Path) -> None:
    """New ones may have an adapter from its answer on, until that of its removal; those that have it end with its
    tokens, and its memory is free then."""
    card_of(harness)
    front_end = harness.front_end()
    front_end.accepted("plain", max_tokens=300)
    front_end.rejected("early", adapter="odd")
    memory = harness.actor.scheduler.memory
    room, directory = memory.kv_bytes_max, write_opaque_adapter(tmp_path)
    assert isinstance(load(harness, "odd", directory), Done)
    card = harness.shared_status.model
    assert card is not None
    assert (card.adapters, card.parameter_bytes) == (["odd"], 1000)
    assert memory.kv_bytes_max == room - 1000
    assert harness.adapters == [f"odd={directory}"]
    front_end.accepted("with", max_tokens=100, adapter="odd")
    harness.passes(3)
    assert isinstance(unload(harness, "odd"), Done)
    assert harness.shared_status.model is not None
    assert harness.shared_status.model.adapters == []
    late = front_end.rejected("late", adapter="odd")
    assert (late.code, late.message) == ("bad_request", "adapter: the model has no 'odd', it has none")
    # A supervisor would start it again with the adapter, for those that it has to resume.
    assert harness.adapters == [f"odd={directory}"]
    assert refused(load(harness, "odd", directory))[0] == "conflict"
    front_end.wait_for_end("with")
    harness.run_until(lambda: not harness.adapters)
    assert memory.kv_bytes_max == room
    front_end.wait_for_end("plain")
    assert front_end.tokens["with"] == expected("odd", 100)
    assert front_end.tokens["plain"] == expected("", 300)


def test_an_adapter_is_loaded_once_however_often_it_is_asked_for(harness: Harness, tmp_path: Path) -> None:
    """A front-end repeats what was not answered. Other contents of the same name are refused."""
    directory = write_opaque_adapter(tmp_path / "a")
    again = AdapterCall(b"operator", next(_calls), "odd", directory)
    assert [type(reply) for reply in answers_of(harness, again, again)] == [Done, Done]
    assert isinstance(load(harness, "odd", directory), Done)
    assert sum(call.method == "load_adapter" for call in harness.engine.calls) == 1
    other = write_opaque_adapter(tmp_path / "b", fill=b"b")
    assert refused(load(harness, "odd", other)) == (
        "conflict",
        "the adapter odd is loaded with other contents: unload it first",
    )
    assert isinstance(unload(harness, "nothing"), Done)
    assert isinstance(unload(harness, "odd"), Done)
    assert isinstance(load(harness, "odd", other), Done)


def test_what_cannot_be_loaded_is_refused_with_the_reason(harness: Harness, tmp_path: Path) -> None:
    """No such directory, no adapter in it, and a worker that stops."""
    code, message = refused(load(harness, "odd", str(tmp_path / "none")))
    assert code == "model_load"
    assert message.startswith("the adapter odd cannot be read: ")
    directory = write_opaque_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text('{"fine_tune_type": "dora"}')
    assert "'dora', not lora" in refused(load(harness, "odd", directory))[1]
    harness.shared_status.state = "ready"
    harness.shared_status.ask_to_drain()
    assert refused(load(harness, "odd", directory))[0] == "draining"


def test_an_adapter_that_fits_no_memory_is_refused_with_figures(make_harness: Make, tmp_path: Path) -> None:
    """For good, or as long as requests need it; what is cached gives way."""
    engine = FakeEngineConfig(kv_bytes_token=1000, prompt_cache_bytes=1 << 30)
    harness = make_harness(engine, memory_limit_bytes=1_000_000, prompt_cache_share=0.9)
    memory = harness.actor.scheduler.memory
    assert memory.kv_bytes_max == 900_000
    too_large = write_opaque_adapter(tmp_path / "large", 899_000)
    assert refused(load(harness, "large", too_large)) == (
        "never_fits",
        "the adapter large needs 899000 bytes while it is loaded, and beside the weights there are 900000: raise "
        "--memory-limit or unload another one",
    )
    front_end = harness.front_end()
    front_end.accepted("cached", range(1, 400), max_tokens=2)
    front_end.wait_for_end("cached")
    assert harness.engine.memory().prompt_cache > 300_000
    front_end.accepted("long", range(1, 400), max_tokens=300)
    harness.passes(3)
    half = write_opaque_adapter(tmp_path / "half", 500_000)
    code, message = refused(load(harness, "half", half))
    assert code == "overloaded"
    assert message == (
        "the adapter half needs 500000 bytes while it is loaded, and of 900000 beside the weights requests need "
        "699000 now"
    )
    front_end.wait_for_end("long")
    assert isinstance(load(harness, "half", half), Done)
    # The harness asserts after every pass that all of it is within the limit.
    assert memory.kv_bytes_max == 400_000
    assert harness.engine.memory().prompt_cache <= 400_000
    assert front_end.rejected("longer", range(1, 400), max_tokens=300).code == "never_fits"
    assert isinstance(unload(harness, "half"), Done)
    front_end.accepted("longer", range(1, 400), max_tokens=300)


def test_an_engine_that_fails_at_an_adapter_serves_on(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator is told, and memory is divided as before."""
    memory = harness.actor.scheduler.memory
    room = memory.kv_bytes_max

    def fail(files: object, make_room: Callable[[int], None] = lambda bytes_: None) -> None:
        make_room(1000)
        raise RuntimeError("no more memory")

    directory = write_opaque_adapter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(harness.engine, "load_adapter", fail)
        assert refused(load(harness, "odd", directory))[0] == "internal"
    assert memory.kv_bytes_max == room
    card_of(harness)
    assert isinstance(load(harness, "odd", directory), Done)
    monkeypatch.setattr(harness.engine, "unload_adapter", fail)
    assert isinstance(unload(harness, "odd"), Done)
    harness.pass_()
    # It stays, and so do the requests that name it.
    assert harness.shared_status.model is not None
    assert harness.shared_status.model.adapters == ["odd"]
    front_end = harness.front_end()
    front_end.accepted("a", max_tokens=5, adapter="odd")
    front_end.wait_for_end("a")
