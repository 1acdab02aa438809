"""Preparation beside the actor: whatever it does, it costs its own request and nobody else's."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.worker.harness import Harness
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
from zmqengine.engine.grammar import grammar
from zmqengine.engine.grammar.matcher import RowMatcher
from zmqengine.errors import BadRequest
from zmqengine.pico import model_path
from zmqengine.protocol.messages import Accepted, Constraint, Insert, Rejected
from zmqengine.worker.preparing.preparer import LONG_PROMPT_TOKENS, THREADS
from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

MakeHarness = Callable[..., Harness]
JSON = Constraint("json")


class Panic(BaseException):
    """Stands for pyo3's PanicException, which is no Exception."""


class Gate:
    """Compiles nothing before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def compile(self, constraint: Constraint) -> Any:
        assert self.opened.wait(60)
        raise BadRequest("the gate was opened")


class Compiler:
    """Calls `how` instead of compiling a constraint."""

    def __init__(self, how: Callable[[Constraint], Any]) -> None:
        self.compile = how


def failing(error: BaseException) -> Compiler:
    def compile_(constraint: Constraint) -> Any:
        raise error

    return Compiler(compile_)


@pytest.mark.parametrize(
    ("error", "code"), [(Panic("a bug"), ""), (RuntimeError("a bug"), ""), (BadRequest("odd"), "bad_request")]
)
def test_a_preparation_that_fails_ends_its_request_alone(
    make_harness: MakeHarness, error: BaseException, code: str
) -> None:
    """Also by a panic of a Rust library: the worker serves on."""
    harness = make_harness(compiler=failing(error))
    front_end = harness.front_end()
    front_end.accepted("beside", max_tokens=50)
    front_end.accepted("bad", constraint=JSON)
    (end,) = front_end.wait_for_end("bad")
    assert (end.finish, end.code) == ("error", code)
    assert front_end.wait_for_end("beside")[0].finish == "length"


def test_a_refusal_frees_what_it_refuses_at_once(make_harness: MakeHarness) -> None:
    """Without the garbage collector, which does not know that a grammar takes megabytes."""
    kept: list[weakref.ref[Compiler]] = []

    def refuse(constraint: Constraint) -> Any:
        grammar = failing(RuntimeError())
        kept.append(weakref.ref(grammar))
        raise BadRequest("too complex")

    harness = make_harness(compiler=Compiler(refuse))
    gc.collect()
    gc.disable()
    try:
        front_end = harness.front_end()
        front_end.accepted("bad", constraint=JSON)
        front_end.wait_for_end("bad")
        harness.run_until(lambda: kept[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["constraint", "long prompt"])
def test_the_queue_is_bounded_while_requests_are_prepared(make_harness: MakeHarness, kind: str) -> None:
    """The share of one front-end holds whatever phase its requests are in, and each end gives its place back."""
    gate = Gate()
    if kind == "constraint":
        harness = make_harness(compiler=gate, queue_max=8)
        fields: dict[str, Any] = {"constraint": JSON}
    else:
        harness = make_harness(
            FakeEngineConfig(context_tokens=20_000, rows_max=1),
            compiler=gate,
            queue_max=8,
            context_max=20_000,
        )
        fields = {"prompt": [5] * LONG_PROMPT_TOKENS}
        harness.front_end().accepted("row", max_tokens=5000)
    greedy, other = harness.front_end(), harness.front_end()
    replies = [greedy.insert(f"r{number}", **fields) for number in range(10)]
    assert [isinstance(reply, Accepted) for reply in replies] == [True] * 4 + [False] * 6
    assert {reply.code for reply in replies if isinstance(reply, Rejected)} == {"overloaded"}
    other.accepted("other", **fields)
    assert greedy.rejected("early", **fields).code == "overloaded"
    greedy.abort("r0")
    greedy.accepted("late", **fields)
    gate.opened.set()


def test_a_peer_that_may_not_is_told_nothing_of_the_load(make_harness: MakeHarness) -> None:
    """A priority that is not allowed is refused as such, though the queue is full."""
    gate = Gate()
    harness = make_harness(compiler=gate, queue_max=1, priority_min=("te*=5",))
    front_end = harness.front_end()
    front_end.accepted("first", priority=5, constraint=JSON)
    assert front_end.rejected("second", priority=5).code == "overloaded"
    assert front_end.rejected("second", priority=0).code == "not_authorized"
    gate.opened.set()


def test_an_urgent_request_is_prepared_before_those_that_came_first(make_harness: MakeHarness) -> None:
    """The next that is compiled is of the best class; in a class they come in order."""
    turns = threading.Semaphore(0)
    order: list[str] = []

    def compile_(constraint: Constraint) -> Any:
        assert turns.acquire(timeout=60)
        order.append(constraint.text)
        raise BadRequest("made by a test")

    harness = make_harness(FakeEngineConfig(context_tokens=20_000), compiler=Compiler(compile_))
    batch, person = harness.front_end(), harness.front_end()
    for number in range(8):
        batch.accepted(f"b{number}", constraint=Constraint("regex", "batch"), priority=5)
    person.accepted("p", constraint=Constraint("regex", "person"), priority=-5)
    turns.release(THREADS + 1)
    person.wait_for_end("p")
    assert order.index("person") <= THREADS
    turns.release(20)
    batch.wait_for_end(*(f"b{number}" for number in range(8)))


def test_a_preparation_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """A read of a disk that is gone never returns."""
    script = """
import threading
from zmqengine.worker.preparing.preparer import Preparer
from zmqengine.worker.requests.ticket import Ticket
class Request:
    ticket = Ticket("a", 1.0, 0, 1, 1, 0, 0.0)
began = threading.Event()
def hang():
    began.set()
    threading.Event().wait()
preparer = Preparer(lambda: None)
preparer.start(Request(), hang)
began.wait()
preparer.close()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_each_request_compiles_its_grammar_and_keeps_it_until_its_end(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, small_heap: None
) -> None:
    """Of three requests with one constraint nothing is left, though the session still holds them and threads are
    idle: states of a kept lexer would wear it out, and take memory that no ledger knows."""
    made: list[weakref.ref[Compiled]] = []

    class Compiled:
        """Stands for llguidance's matcher, to which no weak reference can be made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.matcher = LLMatcher(*arguments, **options)
            made.append(weakref.ref(self))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

    def alive() -> tuple[int, int, int]:
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        return sum(each() is not None for each in made), kinds[RowMatcher], kinds[Insert]

    monkeypatch.setattr(grammar, "LLMatcher", Compiled)
    engine = FakeEngine(FakeEngineConfig(vocab_size=1280))
    compiler = ConstraintCompiler((model_path() / "tokenizer.json").read_bytes(), engine.info)
    harness = make_harness(engine, compiler=compiler)
    front_end = harness.front_end()
    for number in range(3):
        front_end.accepted(f"r{number}", constraint=JSON)
        if not number:
            harness.run_until(lambda: harness.actor.scheduler.running)
            assert alive() == (1, 1, 1)
        front_end.wait_for_end(f"r{number}")
    harness.run_until(lambda: not harness.actor.scheduler.leaving)
    assert (len(made), alive()) == (3, (0, 0, 0))
