"""Preparation beside the actor: whatever it does, it costs its own request and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.harness import Harness
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint

MakeHarness = Callable[..., Harness]
JSON = Constraint("json")


class Panic(BaseException):
    """Stands for pyo3's PanicException, which is no Exception."""


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
