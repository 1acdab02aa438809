"""Constraints from the client library to the worker: refused beside the actor, kept across kills."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.support.workers import START_S, WorkerProcess
from zmqengine.conformance.front_end import FrontEnd
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint
from zmqengine.testing import FakeWorker
from zmqengine_client import Client

KILLS = int(os.environ.get("ZMQENGINE_TEST_KILLS", "2"))
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
YES = Constraint("choice", choices=["yes"])


@pytest.fixture(scope="module")
def pico():
    """A worker with the bundled model, with its supervisor."""
    with WorkerProcess(None, model="pico") as worker:
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
        pytest.raises(BadRequest, match="no constraint"),
    ):
        client.generate_tokens([1, 2], constraint=POINT).read()


def worker_client(worker: FakeWorker):

    return Client(worker.address)


def test_streams_under_a_constraint_survive_kills(pico: WorkerProcess) -> None:
    """A new life feeds the grammar what was said already: nothing is lost or repeated, and all of it is valid."""
    with pico.client() as client:
        prompts = [f"Tell me about number {index}." for index in range(8)]
        alone = [
            client.generate(text, constraint=POINT, temperature=0.9, seed=index, max_tokens=100).read().text
            for index, text in enumerate(prompts)
        ]
        for _ in range(KILLS):
            streams = [
                client.generate(text, constraint=POINT, temperature=0.9, seed=index, max_tokens=100)
                for index, text in enumerate(prompts)
            ]
            reading = iter(streams[0])
            next(reading)
            pico.kill_engine()
            for text, stream in zip(alone, streams, strict=True):
                done = stream.read()
                assert done.finish == "stop"
                assert done.text == text
