"""The direct ZeroMQ wire, spoken by a gateway of our own, on a worker with the fake engine."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from tokenizers import Tokenizer

from tests.smg.serving import adapter
from tests.smg.zmq_gateway import ZmqGateway, engine_path, tokens_of
from tests.support.workers import START_S, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client
from zmqengine_smg.zmq_link import dial, handshake_address
from zmqengine_smg.zmq_messages import Outputs, Registration

STOP, LENGTH, ERROR = 0, 1, 3


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """A worker whose output ends at its 51st token."""
    with FakeWorker(FakeEngineConfig(eos_index=50), process=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(worker: FakeWorker) -> Iterator[ZmqGateway]:
    """A gateway that has an adapter on that worker as its engine."""
    with engine_path() as path, adapter(worker=worker.address, engine=f"ipc://{path}"):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        yield gateway
        gateway.close()


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[FakeWorker]:
    """A worker whose requests are still running when a test looks."""
    with FakeWorker(FakeEngineConfig(step_ms=20), process=True) as worker:
        yield worker


def running(worker: FakeWorker) -> int:
    """Requests that the worker holds."""
    with Client(worker.address) as client:
        numbers = client.status().numbers
        return int(numbers["running"] + numbers["queued"])


def array(wire: list[Any], code: str) -> tuple[Any, ...]:
    """The values of an array of the wire."""
    return struct.unpack(f"<{len(wire[2].data) // struct.calcsize(code)}{code}", wire[2].data)


@pytest.mark.parametrize(
    ("path", "port"), [("/tmp/smg-zmq/ts0.ipc", 25152), ("/tmp/smg-zmq/engine-31000", 22714)]
)
def test_the_port_of_the_handshake_is_the_gateways(path: str, port: int) -> None:
    """The two examples that its own tests have."""
    assert handshake_address(path) == f"tcp://127.0.0.1:{port}"


def test_the_registration_tells_the_context(gateway: ZmqGateway) -> None:
    """The gateway takes what prompts leave of it as max_tokens."""
    assert gateway.registration["max_model_len"] == 4096
    assert gateway.registration["data_parallel_size"] == 1


def test_a_request_gets_its_tokens_and_counts(gateway: ZmqGateway, worker: FakeWorker) -> None:
    """In order, the counts of its prompt with the first, one end."""
    gateway.add("a", [7, 8, 9], max_tokens=6, seed=3)
    outputs = gateway.read("a")["a"]
    assert tokens_of(outputs) == worker.expected_tokens([7, 8, 9], 6, seed=3)
    assert outputs[0]["stats"]["num_prompt_tokens"] == 3
    assert [output["finish_reason"] for output in outputs][-1] == LENGTH


def test_an_end_token_ends_unless_it_is_ignored(gateway: ZmqGateway, worker: FakeWorker) -> None:
    """The gateway names no end token for a request that is to ignore it."""
    gateway.add("eos", [5], max_tokens=100)
    gateway.add("on", [5], max_tokens=60, _eos_token_id=None, stop_token_ids=[])
    stop = worker.expected_tokens([5], 10)[3]
    gateway.add("stopped", [5], max_tokens=100, stop_token_ids=[stop, 0])
    found = gateway.read("eos", "on", "stopped")
    assert len(tokens_of(found["eos"])) == 51
    assert (found["eos"][-1]["finish_reason"], found["eos"][-1]["stop_reason"]) == (STOP, None)
    assert len(tokens_of(found["on"])) == 60
    assert (found["stopped"][-1]["finish_reason"], found["stopped"][-1]["stop_reason"]) == (STOP, stop)


def test_what_the_context_leaves_is_no_limit(gateway: ZmqGateway) -> None:
    """So much stands there when the user gave none: it must not be held against the worker's memory."""
    gateway.add("open", [5], max_tokens=4095)
    assert len(tokens_of(gateway.read("open")["open"])) == 51


def test_logprobs_are_arrays_of_equal_rows(gateway: ZmqGateway) -> None:
    """The token itself first, then the most probable, and its own rank."""
    gateway.add("l", [5], max_tokens=3, logprobs=2)
    ids: list[int] = []
    for output in gateway.read("l")["l"]:
        token_ids, values, ranks, _ = output["new_logprobs"]
        rows = token_ids[1][0]
        assert token_ids[:2] == ["<i8", [rows, 3]]
        assert values[:2] == ["<f4", [rows, 3]]
        assert ranks[:2] == ["<i8", [rows]]
        ids += array(token_ids, "q")[::3]
        assert all(value <= 0 for value in array(values, "f"))
        assert all(rank >= 1 for rank in array(ranks, "q"))
        assert list(array(token_ids, "q")[::3]) == output["new_token_ids"]
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("fields", "sampling", "named"),
    [
        ({2: [1]}, {}, "mm_features"),
        ({6: ["lora", 1, "path"]}, {}, "lora_request"),
        ({7: "salt"}, {}, "cache_salt"),
        ({9: [1]}, {}, "prompt_embeds"),
        ({15: True}, {}, "resumable"),
        ({13: 1000}, {}, "priority"),
        ({1: []}, {}, "prompt"),
        ({1: ["x"]}, {}, "str"),
        ({}, {"min_tokens": 21, "max_tokens": 20}, "min_tokens"),
        ({}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({}, {"structured_outputs": {"json": {"type": "object"}, "_backend": "x"}}, "constraint"),
        ({}, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({}, {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "whitespace_pattern"),
        ({}, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({}, {"structured_outputs": {"grammar": 'root ::= "a"'}}, "EBNF"),
        ({}, {"structured_outputs": {"regex": 5}}, "constraint"),
        ({}, {"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({}, {"_bad_words_token_ids": [[3]]}, "_bad_words_token_ids"),
        ({}, {"extra_args": {"a": 1}}, "extra_args"),
        ({}, {"thinking_token_budget": 5}, "thinking_token_budget"),
        ({}, {"something_new": 5}, "something_new"),
        ({}, {"n": 2}, "n:"),
        ({}, {"temperature": -1.0}, "temperature"),
        ({}, {"top_k": "x"}, "top_k"),
        ({}, {"logprobs": -1}, "logprobs"),
        ({}, {"max_tokens": 5000}, "context"),
        ({}, {"logit_bias": {4000: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    gateway: ZmqGateway, fields: dict[int, Any], sampling: dict[str, Any], named: str
) -> None:
    """The request ends with an error that names the field; the connection serves on."""
    gateway.add("bad", [5], fields=fields, **sampling)
    (output,) = gateway.read("bad")["bad"]
    assert output["finish_reason"] == ERROR
    assert named in output["stop_reason"]


def test_what_is_off_asks_for_nothing(gateway: ZmqGateway) -> None:
    """Zero, false and empty are how the gateway leaves a parameter out."""
    gateway.add(
        "off", [5], min_tokens=0, extra_args={}, skip_reading_prefix_cache=False, _all_stop_token_ids=[0]
    )
    assert gateway.read("off")["off"][-1]["finish_reason"] == LENGTH


def test_garbage_is_passed_over(gateway: ZmqGateway) -> None:
    """Nothing that a gateway sends ends the connection."""
    gateway.send(b"\x00", {"not": "a request"})
    gateway.send(b"\x01", 5)
    gateway.send(b"\x02", None)
    gateway.send(b"\x09", None)
    gateway.send(b"\x03", (0, 77, "reset_prefix_cache", ()))
    gateway.add("after", [5])
    assert gateway.read("after")["after"][-1]["finish_reason"] == LENGTH
    assert gateway.utility[0] == 77
    assert "reset_prefix_cache" in gateway.utility[1]


def test_requests_of_one_moment_share_messages(gateway: ZmqGateway, worker: FakeWorker) -> None:
    """64 users: each gets what it asked for, in far fewer messages than tokens; the load is told."""
    ids = [f"user-{number}" for number in range(64)]
    for number, request_id in enumerate(ids):
        gateway.add(request_id, [number + 1], max_tokens=20, seed=number)
    found = gateway.read(*ids)
    for number, request_id in enumerate(ids):
        assert tokens_of(found[request_id]) == worker.expected_tokens([number + 1], 20, seed=number)
    while not any(load["num_running_reqs"] == 0 for load in gateway.loads):
        gateway.receive()
    assert gateway.loads[-1]["kv_cache_usage"] <= 1.0


def test_an_aborted_request_leaves_the_worker(slow_worker: FakeWorker) -> None:
    """The gateway aborts when its client has gone."""
    with engine_path() as path, adapter(worker=slow_worker.address, engine=f"ipc://{path}"):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        gateway.add("gone", [5], max_tokens=3000)
        wait_until(lambda: running(slow_worker) == 1, "it does not run")
        gateway.send(b"\x01", ["gone", "unknown"])
        wait_until(lambda: running(slow_worker) == 0, "an aborted request runs on")
        gateway.close()


def test_a_gateway_that_comes_back_gets_the_engine_again(slow_worker: FakeWorker) -> None:
    """What the lost one had asked for is aborted; the next one shakes hands and is served."""
    with engine_path() as path, adapter(worker=slow_worker.address, engine=f"ipc://{path}"):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        gateway.add("lost", [5], max_tokens=3000)
        wait_until(lambda: running(slow_worker) == 1, "it does not run")
        gateway.close()
        wait_until(lambda: running(slow_worker) == 0, "the request of a gateway that is gone runs on")
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        gateway.add("new", [5])
        assert tokens_of(gateway.read("new")["new"]) == slow_worker.expected_tokens([5], 5)
        gateway.close()


def test_what_was_left_for_a_gateway_is_not_given_to_the_next() -> None:
    """It listens at the same addresses, and knows nothing of the requests of the one before."""

    async def leave(path: Path) -> ZmqGateway:
        context = zmq.asyncio.Context()
        registration = Registration(max_model_len=64, max_num_seqs=4, instance_id="one")
        first = ZmqGateway(path)
        shaking = asyncio.to_thread(first.shake_hands)
        link, _ = await asyncio.gather(dial(context, str(path), lambda: registration), shaking)
        first.close()
        await asyncio.wait_for(link.gone.wait(), START_S)
        sending = asyncio.create_task(link.send(Outputs(timestamp=1.0)))
        await asyncio.wait({sending}, timeout=0)
        following = ZmqGateway(path)
        link.close()
        await asyncio.wait({sending})
        # Returns when all that had somewhere to go has gone there.
        await asyncio.to_thread(context.term)
        return following

    with engine_path() as path:
        following = asyncio.run(leave(path))
        assert not following.has_output()
        following.close()


def test_streams_survive_the_worker(slow_worker: FakeWorker) -> None:
    """It is killed and comes back: the gateway notices nothing, no token is lost or repeated."""
    with engine_path() as path, adapter(worker=slow_worker.address, engine=f"ipc://{path}"):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        gateway.add("kept", [5], max_tokens=40)
        first: list[dict[str, Any]] = []
        while not first:
            first = gateway.receive() or []
        slow_worker.restart()
        rest = gateway.read("kept")["kept"]
        assert tokens_of(first + rest) == slow_worker.expected_tokens([5], 40)
        gateway.close()


def test_a_worker_that_stays_away_is_told(slow_worker: FakeWorker) -> None:
    """The gateway hears the engine's last word, and the handshake again once there is a worker."""
    with engine_path() as path, adapter(worker=slow_worker.address, engine=f"ipc://{path}", patience_s=0.3):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        slow_worker.kill()
        while gateway.receive() is not None:
            pass
        slow_worker.start()
        gateway.shake_hands()
        gateway.add("new", [5])
        assert tokens_of(gateway.read("new")["new"]) == slow_worker.expected_tokens([5], 5)
        gateway.close()


def test_what_runs_may_finish_when_the_adapter_stops(slow_worker: FakeWorker) -> None:
    """Then the engine says its last word; what comes meanwhile is refused."""
    with (
        engine_path() as path,
        adapter(worker=slow_worker.address, engine=f"ipc://{path}") as running_adapter,
    ):
        gateway = ZmqGateway(path)
        gateway.shake_hands()
        gateway.add("kept", [5], max_tokens=40)
        first: list[dict[str, Any]] = []
        while not first:
            first = gateway.receive() or []
        running_adapter.stop()
        rest = gateway.read("kept")["kept"]
        assert tokens_of(first + rest) == slow_worker.expected_tokens([5], 40)
        assert gateway.receive() is None
        running_adapter.join()
        gateway.close()


def test_the_tokenizer_is_written_for_the_gateway(worker: FakeWorker, tmp_path: Path) -> None:
    """A directory that `smg launch --model-path` takes, also where the model itself is elsewhere."""
    directory = tmp_path / "model"
    with (
        engine_path() as path,
        adapter(worker=worker.address, engine=f"ipc://{path}", tokenizer_directory=directory),
    ):
        wait_until((directory / "config.json").exists, "no tokenizer is written")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Hello").ids) == "Hello"
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [0]}
    assert not list(directory.glob("*.part"))
