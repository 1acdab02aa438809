"""The MLX engine service, called by a real gRPC client, on a worker with the fake engine."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from tokenizers import Tokenizer

from tests.smg.serving import WAIT_S, Adapter, Gateway, serving
from tests.support.ports import free_port
from tests.support.workers import wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client
from zmqengine_smg import SmgConfig, grpc_service
from zmqengine_smg.upstream import ModelChanged

SLOW = FakeEngineConfig(step_ms=20)


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """A worker whose output ends at its 51st token."""
    with FakeWorker(FakeEngineConfig(eos_index=50), process=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(worker: FakeWorker) -> Iterator[Gateway]:
    """A client of an adapter on that worker."""
    with serving(worker.address) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[FakeWorker]:
    """A worker whose requests are still running when a test looks."""
    with FakeWorker(SLOW, process=True) as worker:
        yield worker


def refusal(call: Any) -> grpc.RpcError:
    """The error that the call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def running(worker: FakeWorker) -> int:
    """Requests that the worker holds."""
    with Client(worker.address) as client:
        numbers = client.status().numbers
        return int(numbers["running"] + numbers["queued"])


def test_a_whole_answer_has_the_workers_tokens(gateway: Gateway, worker: FakeWorker) -> None:
    """Not streamed: one message with every token and the counts."""
    (answer,) = gateway.generate([7, 8, 9], max_tokens=6, seed=3)
    complete = answer.complete
    assert list(complete.output_ids) == worker.expected_tokens([7, 8, 9], 6, seed=3)
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 6)
    assert complete.finish_reason == "length"
    assert not complete.HasField("output_logprobs")


def test_a_stream_has_the_same_tokens_in_parts(gateway: Gateway, worker: FakeWorker) -> None:
    """Streamed: chunks whose counts go up, and an end without tokens."""
    *parts, last = gateway.generate([7, 8, 9], max_tokens=6, seed=3, stream=True)
    tokens = [token for part in parts for token in part.chunk.token_ids]
    assert tokens == worker.expected_tokens([7, 8, 9], 6, seed=3)
    assert parts[-1].chunk.completion_tokens == 6
    assert not last.complete.output_ids
    assert last.complete.finish_reason == "length"
    assert last.complete.completion_tokens == 6


def test_an_end_token_ends_and_a_stop_token_is_named(gateway: Gateway, worker: FakeWorker) -> None:
    """Both finish with `stop`; only the one that was asked for is told."""
    (ended,) = gateway.generate([5], max_tokens=100)
    assert ended.complete.finish_reason == "stop"
    assert not ended.complete.HasField("matched_stop_token_id")
    stop = worker.expected_tokens([5], 10)[3]
    (stopped,) = gateway.generate([5], max_tokens=100, stop_token_ids=[stop])
    assert stopped.complete.finish_reason == "stop"
    assert stopped.complete.matched_stop_token_id == stop
    (on,) = gateway.generate([5], max_tokens=60, ignore_eos=True)
    assert on.complete.completion_tokens == 60


def test_max_tokens_left_out_is_all_that_the_context_leaves(gateway: Gateway) -> None:
    """The answer runs to its end token, far beyond any default."""
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5]), sampling_params=pb.SamplingParams(temperature=0)
    )
    (answer,) = gateway.stub.Generate(request, timeout=WAIT_S)
    assert answer.complete.completion_tokens == 51


def test_logprobs_come_a_row_for_each_token(gateway: Gateway) -> None:
    """With the most probable ones of each place; streamed or not."""
    (answer,) = gateway.generate([5], max_tokens=4, logprobs=2)
    shaped = answer.complete.output_logprobs
    assert list(shaped.token_ids) == list(answer.complete.output_ids)
    assert [len(top.token_ids) for top in shaped.top_logprobs] == [2] * 4
    assert len(shaped.token_logprobs) == 4
    parts = list(gateway.generate([5], max_tokens=4, logprobs=2, stream=True))[:-1]
    streamed = [value for part in parts for value in part.chunk.output_logprobs.token_logprobs]
    assert streamed == pytest.approx(list(shaped.token_logprobs))


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([], {}, "input_ids"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"max_tokens": 5000}, "context"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 3.0}, "top_p"),
        ([5], {"logprobs": -1}, "logprobs"),
        ([5], {"logit_bias": {4000: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [4000]}, "stop_token_ids"),
        ([4000], {}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    gateway: Gateway, prompt: list[int], sampling: dict[str, Any], named: str
) -> None:
    """INVALID_ARGUMENT, with the field in the text."""
    error: Any = refusal(gateway.generate(prompt, **sampling))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.details()


def test_text_is_refused(gateway: Gateway) -> None:
    """The gateway tokenises."""
    error: Any = refusal(gateway.stub.Generate(pb.GenerateRequest(text="Hello"), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_negative_seed_is_a_seed(gateway: Gateway) -> None:
    """The same one gives the same tokens."""
    first, second, other = (
        list(next(iter(gateway.generate([5], seed=seed))).complete.output_ids) for seed in (-4, -4, -5)
    )
    assert first == second != other


def test_an_id_longer_than_the_workers_is_served(gateway: Gateway) -> None:
    """The gateway's ids have 70 characters."""
    (answer,) = gateway.generate([5], request_id="chatcmpl-" + "x" * 61)
    assert answer.complete.finish_reason == "length"


def test_a_request_that_is_cancelled_leaves_the_worker(slow_worker: FakeWorker) -> None:
    """The caller goes away in the middle of a stream, and before its first token."""
    with serving(slow_worker.address) as gateway:
        call = gateway.generate([5], max_tokens=3000, stream=True)
        next(call)
        wait_until(lambda: running(slow_worker) == 1, "it does not run")
        call.cancel()
        whole = gateway.generate([6], max_tokens=3000)
        wait_until(lambda: running(slow_worker) >= 1, "it does not run")
        whole.cancel()
        wait_until(lambda: running(slow_worker) == 0, "a cancelled request runs on")


def test_an_aborted_request_ends_with_what_it_has(slow_worker: FakeWorker) -> None:
    """`Abort` by the gateway's id; an unknown id is no error."""
    with serving(slow_worker.address) as gateway:
        call = gateway.generate([5], max_tokens=3000, stream=True, request_id="mine")
        next(call)
        gateway.stub.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]), timeout=WAIT_S)
        *_, last = call
        assert last.complete.finish_reason == "abort"
        assert 0 < last.complete.completion_tokens < 3000


def test_a_deadline_ends_a_request(slow_worker: FakeWorker) -> None:
    """Here and in the worker."""
    with serving(slow_worker.address) as gateway:
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[5]), sampling_params=pb.SamplingParams(max_tokens=3000)
        )
        error: Any = refusal(gateway.stub.Generate(request, timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: running(slow_worker) == 0, "an overdue request runs on")


def test_the_tokenizer_comes_whole(gateway: Gateway) -> None:
    """A zip in parts; the last part alone has the SHA-256, and the tokenizer in it encodes."""
    parts = list(gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=WAIT_S))
    archive = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
    assert parts[-1].sha256 == hashlib.sha256(archive).hexdigest()
    files = zipfile.ZipFile(io.BytesIO(archive))
    tokenizer = Tokenizer.from_buffer(files.read("tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Hello").ids) == "Hello"
    assert json.loads(files.read("generation_config.json")) == {"eos_token_id": [0]}
    assert "message" in json.loads(files.read("tokenizer_config.json"))["chat_template"]


def test_the_model_and_the_load_are_told(gateway: Gateway) -> None:
    """What the gateway registers the worker with."""
    info = gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_S)
    assert (info.served_model_name, info.vocab_size, info.max_context_length) == ("fake", 1000, 4096)
    assert list(info.eos_token_ids) == [0]
    server = gateway.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S)
    assert server.server_type == "mlx"
    assert server.uptime_seconds > 0


def test_sixty_four_users_get_what_each_asked_for(gateway: Gateway, worker: FakeWorker) -> None:
    """At once, each with a prompt and a seed of its own."""

    def ask(user: int) -> list[int]:
        parts = gateway.generate([user + 1], max_tokens=20, seed=user, stream=True)
        return [token for part in parts for token in part.chunk.token_ids]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert answers == [worker.expected_tokens([user + 1], 20, seed=user) for user in range(64)]


def test_streams_survive_the_worker_and_the_health_tells(slow_worker: FakeWorker) -> None:
    """A killed worker is unhealthy, one that came back is healthy, and no token is lost or repeated."""
    with serving(slow_worker.address) as gateway:
        standard: Any = health_pb2_grpc.HealthStub(gateway.channel)  # type: ignore[no-untyped-call]
        watching = standard.Watch(
            health_pb2.HealthCheckRequest(service="mlx.grpc.engine.MlxEngine"), timeout=WAIT_S
        )
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        call = gateway.generate([5], max_tokens=40, stream=True)
        tokens = list(next(call).chunk.token_ids)
        slow_worker.kill()
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not gateway.healthy()
        slow_worker.start()
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        tokens += [token for part in call for token in part.chunk.token_ids]
        assert tokens == slow_worker.expected_tokens([5], 40)
        assert gateway.healthy()


def test_what_runs_may_finish_when_the_adapter_stops(slow_worker: FakeWorker) -> None:
    """The first signal: no new calls, and the running one to its last token."""
    with serving(slow_worker.address) as gateway:
        call = gateway.generate([5], max_tokens=40, stream=True)
        next(call)
        gateway.adapter.stop()  # type: ignore[attr-defined]
        *_, last = call
        assert last.complete.completion_tokens == 40
        gateway.adapter.join()  # type: ignore[attr-defined]


def test_a_worker_that_is_not_there_yet_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that asks is told so by an error: any answer would have it keep a worker without a model."""
    monkeypatch.setattr(grpc_service, "MODEL_WAIT_S", 0.1)
    with serving("ipc:///tmp/zmqengine-nobody/ctl", ready=False) as gateway:
        with pytest.raises(grpc.RpcError) as caught:
            gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        standard: Any = health_pb2_grpc.HealthStub(gateway.channel)  # type: ignore[no-untyped-call]
        told = standard.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_worker_with_another_model_ends_the_adapter() -> None:
    """Its gateway would send token ids of the model that it knows: better no answer than a wrong one."""
    with FakeWorker(FakeEngineConfig(name="first"), process=True) as worker:
        options: dict[str, Any] = {"worker": worker.address, "listen": f"127.0.0.1:{free_port()}"}
        running_adapter = Adapter(SmgConfig(**options))
        Gateway(options["listen"]).wait_healthy()
        worker.kill()
        with FakeWorker(FakeEngineConfig(name="second"), process=True, bind=worker.address):
            running_adapter.join()
    assert isinstance(running_adapter.error, ModelChanged)
    assert "'second'" in str(running_adapter.error)
