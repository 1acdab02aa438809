"""Workers that are slow, full, dead or many."""

from __future__ import annotations

import contextlib
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.front import call, chat, get, post, send, serving, wait_until
from tests.http.scripted import ScriptedClient, failing
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault
from zmqengine.testing import FakeWorker
from zmqengine_client import errors
from zmqengine_http import HttpConfig
from zmqengine_http.workers.pool import PREFIX_TOKENS, SLACK, Pool
from zmqengine_http.workers.worker import PooledWorker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_two_hundred_at_once_are_all_answered() -> None:
    """mlx_lm.server, measured: 97 of 200 completed, as its listen backlog is 5."""
    with (
        FakeWorker(FakeEngineConfig(), process=True) as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
        ThreadPoolExecutor(200) as threads,
    ):
        together = threading.Barrier(200)

        def one(number: int) -> tuple[int, int]:
            together.wait(60)
            reply = post(front, TEXT, {"prompt": [1 + number], "max_tokens": 16, "stream": True})
            return reply.status, sum(len(event["choices"]) for event in reply.events)

        answers = list(threads.map(one, range(200)))
    assert [status for status, _ in answers] == [200] * 200
    assert all(choices >= 2 for _, choices in answers)


def test_before_a_worker_is_there_all_is_503_but_health() -> None:
    """Alive is not ready; both are told apart, and when to come again."""
    with serving(HttpConfig(workers=("no-such-worker",)), ready=False) as front:
        assert get(front, "/health").status == 200
        for reply in (get(front, "/ready"), post(front, CHAT, chat()), post(front, CHAT, chat(model="x"))):
            assert (reply.status, reply.error["code"]) == (503, "not_ready")
            assert int(reply.headers["retry-after"]) >= 1
        assert get(front, "/v1/models").json["data"] == []


def test_the_context_is_the_workers_and_not_the_models() -> None:
    """`--context-max` bounds the listed context, the cut of `max_tokens` and the refusal for Claude Code."""
    with (
        FakeWorker(FakeEngineConfig(), context_max=100) as worker,
        serving(HttpConfig(workers=(worker.address,), max_tokens_overflow="cut")) as front,
    ):
        assert [model["max_model_len"] for model in get(front, "/v1/models").json["data"]] == [100]
        answer = post(front, TEXT, {"prompt": [1] * 40, "max_tokens": 5000, "ignore_eos": True})
        assert (answer.status, answer.json["usage"]["total_tokens"]) == (200, 100)
        refused = post(front, "/v1/messages", {**chat("a" * 5000, model="fake"), "max_tokens": 10})
        assert (refused.status, refused.json["error"]["message"][:18]) == (400, "prompt is too long")


@pytest.mark.parametrize(
    "opened", [True, pytest.param(False, marks=pytest.mark.process)], ids=["opened", "not-opened"]
)
def test_a_stream_survives_the_death_of_its_worker(opened: bool) -> None:
    """The worker is killed in mid-stream, or before it opened a session, and comes back: no token is lost.

    While it is away new requests get 503 with Retry-After; afterwards they are served.
    """
    # It stands still in the middle of both: neither is over before it is killed, however late that is.
    fault = FakeFault(place="next", action="hang", index=250)
    with (
        FakeWorker(FakeEngineConfig(faults=(fault,)), process=True, pass_timeout_s=0) as worker,
        serving(HttpConfig(workers=(worker.address,), probe_ms=100)) as front,
        ThreadPoolExecutor(2) as threads,
    ):
        body = {"prompt": [3], "seed": 4, "max_tokens": 300}
        expected = post(front, "/detokenize", {"tokens": worker.expected_tokens([3], 300, seed=4)}).json[
            "prompt"
        ]
        if opened:
            assert post(front, TEXT, {**body, "max_tokens": 1}).status == 200
        else:
            worker.freeze()
        streamed = threads.submit(post, front, TEXT, {**body, "stream": True})
        whole = threads.submit(post, front, TEXT, body)
        wait_until(lambda: front.service.pool.workers[0].running == 2, "both run")
        worker.kill()
        wait_until(lambda: not front.service.pool.ready, "the death is noticed")
        refused = post(front, TEXT, body)
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
        assert get(front, "/ready").status == 503
        worker.restart(FakeEngineConfig())
        text = "".join(event["choices"][0]["text"] for event in streamed.result(60).events)
        assert text == expected
        assert whole.result(60).json["choices"][0]["text"] == expected
        wait_until(lambda: front.service.pool.ready, "the new worker is noticed")
        assert post(front, TEXT, body).json["choices"][0]["text"] == expected


def test_an_overloaded_worker_is_a_429_with_retry_after() -> None:
    """The worker's own refusal and hint come through."""
    scripted = ScriptedClient(failing(errors.Overloaded("the queue is full", retry_after_ms=2500)))
    with serving(HttpConfig(), lambda *_: scripted) as front:  # type: ignore[arg-type]
        for stream in (False, True):
            reply = post(front, CHAT, chat(stream=stream))
            assert (reply.status, reply.error["code"]) == (429, "overloaded")
            assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("3", "2500")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.BadRequest("no"), 400),
        (errors.ContextExceeded("no"), 400),
        (errors.NeverFits("no"), 400),
        (errors.TooLarge("no"), 413),
        (errors.Draining("no"), 503),
        (errors.WorkerLost("no"), 503),
        (errors.RowFailed("no"), 500),
        (errors.ConstraintFailed("no"), 422),
        (errors.DeadlineExceeded("no"), 504),
        (errors.ShutDown("no"), 503),
        (errors.SlowConsumer("no"), 500),
        (errors.ZmqEngineError("no"), 500),
    ],
)
def test_every_failure_of_a_worker_has_a_status(error: errors.ZmqEngineError, status: int) -> None:
    """And never a 422, nor a body of another shape."""
    scripted = ScriptedClient(failing(error))
    with serving(HttpConfig(), lambda *_: scripted) as front:  # type: ignore[arg-type]
        reply = post(front, CHAT, chat(stream=True))
        assert reply.status == status
        assert reply.error["message"] == "no"


def test_a_failure_in_mid_stream_is_an_error_event_and_a_clean_end() -> None:
    """The tokens so far are there, then the error, then the end of the response; no [DONE]."""
    fails = FakeFault(place="token", action="fail", token=3, index=5, times=None)
    with (
        FakeWorker(FakeEngineConfig(faults=(fails,))) as worker,
        serving(HttpConfig(workers=(worker.address,))) as front,
    ):
        body = {"prompt": [3], "max_tokens": 1000, "stream": True}
        reply = post(front, TEXT, body)
        *parts, error, _ = reply.body.decode().split("\n\n")
        assert reply.status == 200
        assert "".join(json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "error"
        assert post(front, TEXT, {**body, "stream": False}).status == 500


def test_models_are_served_by_name() -> None:
    """Two workers, two models, and an alias for one of them."""
    with (
        FakeWorker(FakeEngineConfig(name="a")) as first,
        FakeWorker(FakeEngineConfig(name="b", eos_index=0)) as second,
        serving(
            HttpConfig(workers=(first.address, second.address), aliases={"gpt-4o": "b"}, probe_ms=100)
        ) as front,
    ):
        wait_until(lambda: len(front.service.pool.models()) == 3, "both are known")
        assert [card["id"] for card in get(front, "/v1/models").json["data"]] == ["a", "b", "gpt-4o"]
        for name, tokens in (("a", 5), ("b", 1), ("gpt-4o", 1)):
            answer = post(front, CHAT, chat(model=name, max_tokens=5)).json
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, tokens)
        assert post(front, CHAT, chat()).error["param"] == "model"
        assert post(front, CHAT, chat(model="c")).status == 404


def test_workers_of_one_model_share_its_requests() -> None:
    """With one of two dead, the other goes on alone."""
    config = FakeEngineConfig(step_ms=2, context_tokens=1_000_000)
    endless = {"prompt": [1], "max_tokens": 900_000, "ignore_eos": True, "stream": True}
    with FakeWorker(config, process=True) as first, FakeWorker(config, process=True) as second:
        addresses = (first.address, second.address)
        with serving(HttpConfig(workers=addresses, probe_ms=100)) as front:
            workers = front.service.pool.workers
            wait_until(lambda: all(worker.ready for worker in workers), "both are ready")
            with contextlib.ExitStack() as stack:
                for _ in range(8):
                    stack.enter_context(send(front, endless, TEXT))
                wait_until(lambda: [worker.running for worker in workers] == [4, 4], "the load is shared")
            wait_until(lambda: [worker.running for worker in workers] == [0, 0], "all have left")
            second.kill()
            wait_until(lambda: not workers[1].ready, "the death is noticed")
            assert [post(front, TEXT, {"prompt": [1]}).status for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("contexts", [(64, 512), (512, 64)])
def test_workers_of_one_model_may_have_contexts_of_two_lengths(contexts: tuple[int, int]) -> None:
    """A request goes where it fits, whatever the order of the workers; one that fits nowhere is cut at the longest."""
    configs = [FakeEngineConfig(context_tokens=tokens, step_ms=0) for tokens in contexts]
    with (
        FakeWorker(configs[0]) as first,
        FakeWorker(configs[1]) as second,
        serving(HttpConfig(workers=(first.address, second.address))) as front,
    ):
        workers = front.service.pool.workers
        wait_until(lambda: all(worker.ready for worker in workers), "both are ready")
        long = {"prompt": [1], "max_tokens": 400, "ignore_eos": True}
        for _ in range(4):
            assert post(front, TEXT, long).json["usage"]["completion_tokens"] == 400
        assert post(front, TEXT, {"prompt": [1] * 400}).status == 200
        assert post(front, TEXT, long | {"max_tokens": 600}).json["usage"]["completion_tokens"] == 511


def test_several_front_ends_share_a_worker() -> None:
    """Each has a session of its own: they get the same answers, at the same time, and none sees the other's."""
    with FakeWorker(FakeEngineConfig(step_ms=1), process=True) as worker:
        config = HttpConfig(workers=(worker.address,))
        with serving(config) as first, serving(config) as second, ThreadPoolExecutor(16) as threads:
            jobs = [
                threads.submit(post, front, TEXT, {"prompt": [1 + number], "seed": 1, "max_tokens": 50})
                for number in range(8)
                for front in (first, second)
            ]
            texts = [job.result(60).json["choices"][0]["text"] for job in jobs]
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) == 8


def test_a_prompt_goes_where_its_prefix_was_unless_that_worker_is_busy() -> None:
    """Prefix affinity first, load when the difference is large; a cache key stands for a prefix."""
    clients = [ScriptedClient(lambda prompt: "") for _ in range(3)]
    connect: Any = lambda address, _: clients["xyz".index(address)]  # noqa: E731
    with serving(HttpConfig(workers=("x", "y", "z")), connect) as front:
        pool: Pool = front.service.pool
        wait_until(lambda: all(worker.ready for worker in pool.workers), "all are ready")
        model = pool.model("scripted")
        chat_a, chat_b = [1] * PREFIX_TOKENS * 3, [2] * PREFIX_TOKENS * 3

        def home(prompt: list[int], key: str | None = None) -> PooledWorker:
            return pool.choose(model, prompt, key)

        first = home(chat_a)
        first.running = 1
        second = home(chat_b)
        assert second is not first
        # A longer chat with the same beginning goes home, though others are idle.
        assert home([*chat_a, *[3] * 200]) is first
        assert home(chat_b) is second
        third = home([9], "a key")
        first.running, third.running = 0, 1
        assert home([9], "a key") is third
        first.running, third.running = SLACK + 1, 0
        assert home(chat_a) is not first


def test_long_cache_keys_hold_no_memory() -> None:
    """A key may be as long as a body; the pool keeps thousands of them."""
    clients = [ScriptedClient(lambda prompt: "") for _ in range(2)]
    connect: Any = lambda address, _: clients["xy".index(address)]  # noqa: E731
    with serving(HttpConfig(workers=("x", "y")), connect) as front:
        pool: Pool = front.service.pool
        wait_until(lambda: all(worker.ready for worker in pool.workers), "both are ready")
        model = pool.model("scripted")
        tracemalloc.start()
        try:
            for number in range(50):
                pool.choose(model, [1], f"{number}" * 1_000_000)
            assert tracemalloc.get_traced_memory()[0] < 1_000_000
        finally:
            tracemalloc.stop()


def test_a_silent_stream_is_kept_alive() -> None:
    """While a long prompt is read, comments keep proxies from giving the stream up."""
    config = FakeEngineConfig(step_ms=20, prefill_chunk=1)
    with (
        FakeWorker(config, process=True) as worker,
        serving(HttpConfig(workers=(worker.address,), keepalive_ms=100)) as front,
    ):
        reply = call(
            front, "POST", TEXT, json.dumps({"prompt": [1] * 40, "max_tokens": 2, "stream": True}).encode()
        )
        assert reply.body.startswith(b": keepalive\n\n")
        assert reply.events
