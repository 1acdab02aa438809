"""Constraints from the client library to the worker: refused beside the actor, kept across kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from typing import Any

import pytest

from tests.support.hostile_constraints import HOSTILE, OVER_A_LIMIT_PATTERN
from tests.support.workers import START_S, WorkerProcess
from zmqengine.conformance.front_end import FrontEnd
from zmqengine.errors import BadRequest, ConstraintFailed
from zmqengine.protocol.messages import Constraint
from zmqengine.testing import FakeWorker
from zmqengine_client import Client, TokenStream

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("ZMQENGINE_TEST_KILLS", "1"))
"""In this shorter form; by hand it is run with 25."""
POINT = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 999},
                "s": {"enum": ["up", "down"]},
            },
            "required": ["x", "s"],
            "additionalProperties": False,
        }
    ),
)
PATH = Constraint(
    "json_schema",
    json.dumps({"type": "array", "items": json.loads(POINT.text), "minItems": 8, "maxItems": 12}),
)
YES = Constraint("choice", choices=["yes"])
OVER_A_LIMIT = Constraint("regex", OVER_A_LIMIT_PATTERN)


@pytest.fixture(scope="module")
def pico():
    """A worker with the bundled model, with its supervisor."""
    with WorkerProcess(
        None, model="pico", restarts_max=10 * KILLS + 10, restart_wait_ms=1, restart_wait_max_ms=1
    ) as worker:
        with worker.client() as client:
            client.wait_ready()
        yield worker


def test_what_ends_is_whole_and_what_is_refused_names_its_reason(pico: WorkerProcess) -> None:
    """A refusal is made beside the actor, after the request was accepted; the client sees the error of its code."""
    with pico.client() as client:
        done = client.generate("Where is it?", constraint=POINT, temperature=0.9, max_tokens=200).read()
        assert done.finish == "stop"
        assert set(json.loads(done.text)) == {"x", "s"}
        for wrong, named in (
            (Constraint("json_schema", '{"not": {}}'), '"not"'),
            (Constraint("regex", "(a"), "unclosed"),
            (Constraint("choice"), "choices"),
        ):
            with pytest.raises(BadRequest, match=re.escape(named)):
                client.generate("x", constraint=wrong).read()
        assert client.generate("x", max_tokens=3).read().finish == "length"


@pytest.mark.slow
def test_hostile_constraints_do_not_hold_up_others(pico: WorkerProcess) -> None:
    """More of them than the compiler has threads: each ends, and an ordinary one gets its turn."""
    with pico.client() as hostile, pico.client() as client:
        streams = [
            hostile.generate_tokens([5], constraint=Constraint(kind, text, choices), max_tokens=5)
            for kind, text, choices in HOSTILE.values()
        ]
        assert client.generate("x", constraint=YES, max_tokens=20).read().text == "yes"
        for stream in streams:
            with contextlib.suppress(BadRequest):
                assert len(stream.read().tokens) <= 5


def test_an_output_that_was_whole_is_ended_and_not_continued(pico: WorkerProcess) -> None:
    """The worker died after the last token and before its end: the next life sees that nothing can follow."""
    with pico.client() as client:
        whole = client.generate("x", constraint=YES, max_tokens=20).read()
        assert (whole.text, whole.finish) == ("yes", "stop")
    plain = FrontEnd(pico.address, answer_s=START_S)
    try:
        plain.open_session()
        constraint = {"kind": "choice", "choices": ["yes"]}
        accepted = plain.accepted(
            "r", [5], emitted=whole.tokens, max_tokens=20, ignore_eos=False, constraint=constraint
        )
        assert accepted["next_index"] == len(whole.tokens)
        tokens, end = plain.read("r", start=len(whole.tokens))
        assert (tokens, end["finish"]) == ([], "stop")
    finally:
        plain.close()


def test_a_worker_that_cannot_follow_a_constraint_says_so() -> None:
    """The fake engine makes up its tokens: `limits` tells, and the client refuses before it sends."""
    with (
        FakeWorker() as worker,
        worker_client(worker) as client,
        pytest.raises(BadRequest, match="does not support constraints"),
    ):
        client.generate_tokens([1, 2], constraint=POINT).read()


def worker_client(worker: FakeWorker):

    return Client(worker.address)


def test_streams_under_a_constraint_survive_kills(pico: WorkerProcess) -> None:
    """32 streams of four front-ends, killed at any moment: no token is lost or repeated, and every output is valid.

    The free streams in the same batch are what they are alone.
    """
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    outputs = hits = 0
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(pico.client()) for _ in range(4)]
        tokenizer = clients[0].tokenizer()
        free: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 50, "ignore_eos": True}
        alone = clients[0].generate_tokens(tokenizer.encode("Once"), **free).read().tokens
        # On a busy machine all may be over before the kill, which then does not count.
        while hits < KILLS:
            streams = [
                client.generate_tokens(
                    tokenizer.encode(f"Tell me about number {outputs} and {index}."),
                    constraint=PATH, temperature=0.9, seed=index, max_tokens=400,
                )
                for client in clients
                for index in range(8)
            ]  # fmt: skip
            beside = [client.generate_tokens(tokenizer.encode("Once"), **free) for client in clients]
            said: list[list[int]] = [[] for _ in streams]
            # The moment is what is tested: after so many tokens of one of them.
            watched, wanted = moments.randrange(len(streams)), moments.randrange(1, 60)
            while len(said[watched]) < wanted and read_chunk(streams[watched], said[watched]):
                pass
            pico.kill_engine()
            resumed = 0
            for stream, tokens in zip(streams, said, strict=True):
                while read_chunk(stream, tokens):
                    pass
                done = stream.result
                assert tokens == done.tokens, f"seed {seed}"
                assert done.finish == "stop", f"seed {seed}"
                check_path(json.loads(tokenizer.decode(tokens)))
                outputs += 1
                resumed += done.resumed
            assert [stream.read().tokens for stream in beside] == [alone] * len(clients), f"seed {seed}"
            hits += resumed > 0
            print(f"kill {hits} (seed {seed}): {outputs} outputs whole and valid, {resumed} resumed")


def read_chunk(stream: TokenStream, tokens: list[int]) -> bool:
    """Add what comes next, which goes on where the last chunk ended; False at the end."""
    chunk = next(stream, None)
    if chunk is None:
        return False
    assert chunk.first_index == len(tokens)
    tokens.extend(chunk.tokens)
    return True


def check_path(path: Any) -> None:
    assert 8 <= len(path) <= 12
    for point in path:
        assert set(point) == {"x", "s"}
        assert point["x"] in range(1000)
        assert point["s"] in ("up", "down")


def test_an_output_that_meets_a_limit_of_its_constraint_is_an_error_of_its_own(pico: WorkerProcess) -> None:
    """Read whole or as a stream: `constraint_failed` with the limit, and never `stop`.

    Neither the message nor the worker's log has a word of the output, the prompt or the grammar.
    """
    with pico.client() as client:
        alone = client.generate("Once", max_tokens=120, ignore_eos=True).read().tokens
        beside = client.generate("Once", max_tokens=120, ignore_eos=True)
        with pytest.raises(ConstraintFailed, match="too many expressions") as failed:
            client.generate("Tell me about Tom.", constraint=OVER_A_LIMIT, max_tokens=400).read()
        stream = client.generate(
            "Tell me about Tom.", constraint=OVER_A_LIMIT, max_tokens=400, request_id="limited"
        )
        said: list[str] = []
        with pytest.raises(ConstraintFailed):
            said.extend(chunk.text for chunk in stream)
        assert beside.read().tokens == alone
        lines = [line for line in pico.log.splitlines() if "limited" in line]
    assert any("row failed" in line and "too many expressions" in line for line in lines)
    # A piece of the output of several words stands for all of it: its single words may be those of an error.
    words = "".join(said).split()
    pieces = [" ".join(words[at : at + 2]) for at in range(len(words) - 1)]
    assert len(pieces) > 10
    for told in (str(failed.value), *lines):
        assert [piece for piece in (*pieces, "Tom", OVER_A_LIMIT.text) if piece in told] == []
