"""Both clients against a real worker: what they promise to the people who use them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest

from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault
from zmqengine.errors import (
    BadRequest,
    ContextExceeded,
    DeadlineExceeded,
    Fenced,
    RowFailed,
    WorkerLost,
    ZmqEngineError,
)
from zmqengine.protocol.messages import Description, GetMetrics, Metrics, Ping, TokenizerBundle
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient, Client, Completion
from zmqengine_client.aio.waiting import AsyncMailbox
from zmqengine_client.core.options import Options, check_options, make_options
from zmqengine_client.core.request import Request
from zmqengine_client.sync.waiting import Mailbox, Notifier
from zmqengine_client.text import tokenizer_cache
from zmqengine_client.text.tokenizer import Tokenizer

Connect = Callable[..., Any]
HANG_S = 60.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `condition` holds; fails when it does not come."""
    end = time.monotonic() + HANG_S
    while not await condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


async def rows_free(client: Any) -> bool:
    """Whether the worker generates nothing and holds no request."""
    numbers = (await client.status()).numbers
    return bool(numbers["rows_decoding"] + numbers["rows_prefilling"] + numbers["requests_held"] == 0)


async def rows_busy(client: Any) -> bool:
    """Whether something runs that can be aborted."""
    return not await rows_free(client)


def completion_of(error: BaseException) -> Completion:
    """What a failed stream's error carries."""
    completion = error.completion  # type: ignore[attr-defined]
    assert isinstance(completion, Completion)
    return completion


async def fail_while_reading(stream: Any) -> None:
    """A front-end with a defect."""
    async for _ in stream:
        _ = 1 / 0


def test_tokens_are_those_of_the_engine_in_order(connect: Connect, worker: FakeWorker) -> None:
    """Chunks follow each other without a gap, and the completion sums them up."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1, 2, 3], max_tokens=40, seed=5)
            tokens: list[int] = []
            async for chunk in stream:
                assert chunk.first_index == len(tokens)
                assert chunk.logprobs is None
                tokens += chunk.tokens
            assert tokens == worker.expected_tokens([1, 2, 3], 40, seed=5)
            result = stream.result
            assert (result.finish, result.tokens, result.prompt_tokens) == ("length", tokens, 3)
            assert (result.seed, result.request_id, result.resumed) == (5, stream.request_id, 0)

    asyncio.run(scenario())


def test_without_a_seed_one_is_drawn_and_told(connect: Connect, worker: FakeWorker) -> None:
    """The told seed makes the same output again."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            first = await client.generate_tokens([4], max_tokens=10).read()
            other = await client.generate_tokens([4], max_tokens=10).read()
            assert first.seed != other.seed
            again = await client.generate_tokens([4], max_tokens=10, seed=first.seed).read()
            assert again.tokens == first.tokens == worker.expected_tokens([4], 10, seed=first.seed)

    asyncio.run(scenario())


def test_text_is_the_decoded_tokens(connect: Connect, worker: FakeWorker) -> None:
    """`print(chunk)` prints text, and the pieces join to what decoding everything gives."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            tokenizer = await client.tokenizer()
            stream = client.generate("Once upon", max_tokens=50, seed=3)
            pieces = [str(chunk) async for chunk in stream]
            expected = worker.expected_tokens(tokenizer.encode("Once upon"), 50, seed=3)
            assert stream.result.tokens == expected
            assert "".join(pieces) == stream.result.text == tokenizer.decode(expected)

    asyncio.run(scenario())


def test_an_end_token_ends_the_text_and_is_not_in_it(connect: Connect) -> None:
    """The end token is the last token of the completion and has no text."""
    with FakeWorker(FakeEngineConfig(eos_index=7)) as worker:

        async def scenario() -> None:
            async with connect(worker.address) as client:
                stream = client.generate("x", max_tokens=50)
                text = await stream.text()
                assert "<end>" not in text
                assert stream.result.finish == "stop"
                assert stream.result.tokens[-1] == 0
                assert len(stream.result.tokens) == 8
                stop = stream.result.tokens[3]
                seed = stream.result.seed
                stream = client.generate("x", max_tokens=50, seed=seed, stop_token_ids=[stop])
                shorter = await stream.text()
                tokens = stream.result.tokens
                assert tokens[-1] == stop
                assert stop not in tokens[:-1]
                assert shorter == (await client.tokenizer()).decode(tokens[:-1])

        asyncio.run(scenario())


def test_a_chat_goes_through_the_template(connect: Connect, worker: FakeWorker) -> None:
    """The prompt is what the template writes."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            messages = [{"role": "user", "content": "hi"}]
            result = await client.chat(messages, max_tokens=10, seed=1).read()
            prompt = (await client.tokenizer()).encode("user: hi\nassistant: ")
            assert result.prompt_tokens == len(prompt)
            assert result.tokens == worker.expected_tokens(prompt, 10, seed=1)

    asyncio.run(scenario())


def test_a_stop_string_across_tokens_ends_the_text_and_the_request(
    connect: Connect, worker: FakeWorker
) -> None:
    """The worker is aborted at the match; the stop string and what follows are in no chunk."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            tokenizer = await client.tokenizer()
            prompt = tokenizer.encode("story")
            tokens = worker.expected_tokens(prompt, 3000, seed=9)
            text = tokenizer.decode(tokens[:60])
            place = tokenizer.decode(tokens[:30]).rindex(" w") + 1
            stop = text[place : place + 9]
            assert " " in stop, "the stop string lies in one token"
            stream = client.generate("story", max_tokens=3000, seed=9, stop=["never", stop])
            assert await stream.text() == text[: text.index(stop)]
            result = stream.result
            assert (result.finish, result.stop_string) == ("stop", stop)
            assert stop in tokenizer.decode(result.tokens)
            assert stop not in tokenizer.decode(result.tokens[:-1])
            await until(lambda: rows_free(client))

    asyncio.run(scenario())


def test_leaving_a_stream_early_aborts_it(connect: Connect, worker: FakeWorker) -> None:
    """mlx-openai-server #321: a client that gave up kept the GPU busy. A `break` frees the row."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=4000)
            async for _ in stream:
                await until(lambda: rows_busy(client))
                break
            await until(lambda: rows_free(client))
            assert stream.result.finish == "abort"

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["block", "close", "forget", "raise"])
def test_every_way_of_dropping_a_stream_aborts_it(connect: Connect, worker: FakeWorker, how: str) -> None:
    """mlx_lm.server: a non-streaming client that leaves is not noticed. Here its row is free at once."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=4000)
            await stream.__anext__()
            await until(lambda: rows_busy(client))
            if how == "block":
                async with stream:
                    pass
            elif how == "close":
                stream.close()
            elif how == "forget":
                del stream
            else:
                with pytest.raises(ZeroDivisionError):
                    await fail_while_reading(stream)
            await until(lambda: rows_free(client))

    asyncio.run(scenario())


def test_a_with_block_gives_the_stream_with_all_that_it_can(worker: FakeWorker) -> None:
    """For type checkers too: this file is checked with them."""

    async def scenario() -> str:
        async with (
            AsyncClient(worker.address) as client,
            client.generate("hello", max_tokens=3, seed=1) as stream,
        ):
            return await stream.text()

    with Client(worker.address) as client, client.generate("hello", max_tokens=3, seed=1) as stream:
        assert stream.text() == asyncio.run(scenario())


def test_a_cancelled_reader_aborts_though_its_task_is_kept(worker: FakeWorker) -> None:
    """A task keeps the error that ended it, whose traceback keeps the iterator of the loop."""

    async def scenario() -> None:
        async with AsyncClient(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=4000)
            reader = asyncio.create_task(stream.read())
            await until(lambda: rows_busy(client))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await until(lambda: rows_free(client))
            assert stream.result.finish == "abort"

    asyncio.run(scenario())


def test_a_stream_closed_before_its_prompt_was_tokenised_is_never_sent() -> None:
    """The first stream of a client, too: a task that is cancelled at once leaves nothing running."""

    async def scenario(address: str) -> None:
        async with AsyncClient(address) as client:

            async def accepted() -> int:
                return int((await client.status()).numbers["accepted"])

            async def shown() -> bool:
                return await accepted() >= 2

            stream = client.generate("hello", max_tokens=4000)
            stream.close()
            # Its tokenisation is over before that of a later one.
            await client.generate("hello", max_tokens=1).read()
            assert (await client.generate("hi", max_tokens=1).read()).finish == "length"
            # Figures of the status are up to a tenth of a second old.
            await until(shown)
            assert await accepted() == 2

    with FakeWorker() as worker:
        asyncio.run(scenario(worker.address))


def test_a_stream_that_another_thread_collects_is_aborted_on_the_loop(worker: FakeWorker) -> None:
    """The garbage collector runs in any thread; a loop in debug mode raises if one touches it."""

    async def scenario() -> None:
        async with AsyncClient(worker.address) as client:
            streams = [client.generate_tokens([1], max_tokens=4000)]
            await streams[0].__anext__()
            aborted = threading.get_ident()
            abort = client._session.abort_request

            def spy(request: Request, now: float) -> None:
                nonlocal aborted
                aborted = threading.get_ident()
                abort(request, now)

            client._session.abort_request = spy  # type: ignore[method-assign]
            aborted = 0
            await asyncio.to_thread(streams.clear)
            await until(lambda: rows_free(client))
            assert aborted == threading.get_ident()

    asyncio.run(scenario(), debug=True)


class _Panic(BaseException):
    """Stands in for pyo3's PanicException."""


def test_a_panic_while_a_prompt_is_tokenised_ends_its_stream(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Rust extension panics with a BaseException; the reader must not wait for ever."""

    def panic(*_: object, **__: object) -> list[int]:
        raise _Panic("out of order")

    monkeypatch.setattr(Tokenizer, "encode", panic)

    async def scenario() -> None:
        async with AsyncClient(worker.address) as client:
            with pytest.raises(ZmqEngineError, match="cannot be prepared"):
                await asyncio.wait_for(client.generate("hello").read(), HANG_S)

    asyncio.run(scenario())


def test_an_aborted_stream_ends_normally_with_what_has_come(connect: Connect, worker: FakeWorker) -> None:
    """Own abort is no error."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=4000, seed=2)
            await stream.__anext__()
            stream.abort()
            result = await stream.read()
            assert result.finish == "abort"
            assert 0 < len(result.tokens) < 4000
            assert result.tokens == worker.expected_tokens([1], len(result.tokens), seed=2)
            stream.abort()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, BadRequest),
        ([1], {"max_tokens": 0}, BadRequest),
        ([1], {"max_tokens": -1}, BadRequest),
        ([1], {"temperature": float("nan")}, BadRequest),
        ([1], {"temperature": "hot"}, BadRequest),
        ([1], {"top_p": 0.0}, BadRequest),
        ([1], {"logit_bias": {5: float("inf")}}, BadRequest),
        ([1], {"logprobs": 21}, BadRequest),
        ([1], {"seed": -1}, BadRequest),
        ([1], {"request_id": ""}, BadRequest),
        ([1], {"request_id": "x" * 65}, BadRequest),
        ([1], {"stop_token_ids": ["a"]}, BadRequest),
        ([1.5], {}, BadRequest),
        ([1000], {}, BadRequest),
        ([-1], {}, BadRequest),
        ([1] * 5000, {}, ContextExceeded),
        ([1], {"max_tokens": 5000}, ContextExceeded),
    ],
)
def test_bad_input_is_refused_by_name_when_the_stream_is_read(
    connect: Connect,
    worker: FakeWorker,
    prompt: list[Any],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    """vllm-mlx #799, ollama #17183: honoured or refused. The error is typed and comes before anything is sent."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens(prompt, **options)
            with pytest.raises(error) as caught:
                await stream.read()
            assert completion_of(caught.value).tokens == []
            with pytest.raises(error):
                _ = stream.result

    asyncio.run(scenario())


def test_an_unknown_option_is_refused_by_name_at_once(connect: Connect, worker: FakeWorker) -> None:
    """A misspelt parameter is never skipped."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            with pytest.raises(TypeError, match="temprature"):
                client.generate_tokens([1], temprature=1.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("stop", ["", ["a", ""], 4])
def test_bad_stop_strings_are_refused(connect: Connect, worker: FakeWorker, stop: object) -> None:
    """mlx_lm.server: `stop: 4` killed the generation thread."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate("x", stop=stop, max_tokens=2)
            if stop == "":
                await stream.read()
                return
            with pytest.raises(BadRequest, match="stop"):
                await stream.read()

    asyncio.run(scenario())


def test_a_failed_row_raises_with_what_there_is() -> None:
    """The tokens before the failure are good, and other streams go on."""
    fault = FakeFault(place="token", action="fail", token=66, index=5)
    with FakeWorker(FakeEngineConfig(faults=(fault,))) as worker:

        async def scenario(connect: Connect) -> None:
            async with connect(worker.address) as client:
                good = client.generate_tokens([1], max_tokens=20, seed=1)
                bad = client.generate_tokens([66], max_tokens=20, seed=1)
                with pytest.raises(RowFailed) as caught:
                    await bad.read()
                assert completion_of(caught.value).tokens == worker.expected_tokens([66], 5, seed=1)
                assert (await good.read()).tokens == worker.expected_tokens([1], 20, seed=1)

        from tests.client.flavours import ClientInThreads

        asyncio.run(scenario(ClientInThreads))


def test_a_deadline_raises_with_what_there_is(connect: Connect, worker: FakeWorker) -> None:
    """deadline_ms bounds every phase."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            with pytest.raises(DeadlineExceeded) as caught:
                await client.generate_tokens([1], max_tokens=4000, deadline_ms=100).read()
            assert completion_of(caught.value).finish == "deadline"

    asyncio.run(scenario())


def test_logprobs_come_one_for_each_token(connect: Connect, worker: FakeWorker) -> None:
    """In tokens and in text."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            for stream in (
                client.generate_tokens([1], max_tokens=30, logprobs=2),
                client.generate([1], max_tokens=30, logprobs=2),
            ):
                seen = 0
                async for chunk in stream:
                    assert len(chunk.logprobs) == len(chunk.tokens)
                    assert all(len(entry.top) == 2 for entry in chunk.logprobs)
                    seen += len(chunk.tokens)
                assert seen == 30

    asyncio.run(scenario())


def test_a_slow_reader_gets_longer_chunks(connect: Connect, worker: FakeWorker) -> None:
    """What came meanwhile comes at once."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=100)

            async def arrived() -> bool:
                return bool(client.counters.tokens >= 100)

            await until(arrived)
            chunks = [chunk async for chunk in stream]
            assert [len(chunk.tokens) for chunk in chunks] == [100]

    asyncio.run(scenario())


def test_many_streams_are_read_together(connect: Connect, worker: FakeWorker) -> None:
    """`select` gives the chunks of all as they come, and the end of each."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            streams = [client.generate_tokens([number], max_tokens=20, seed=0) for number in range(1, 33)]
            streams.append(client.generate_tokens([1], max_tokens=0))
            got: dict[Any, list[int]] = {stream: [] for stream in streams}
            ended = []
            async for stream, chunk in client.select(streams):
                if chunk is None:
                    ended.append(stream)
                else:
                    got[stream] += chunk.tokens
            assert set(ended) == set(streams)
            assert len(ended) == 33
            for number, stream in enumerate(streams[:-1], 1):
                assert got[stream] == stream.result.tokens == worker.expected_tokens([number], 20)
            with pytest.raises(BadRequest):
                _ = streams[-1].result

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_tokens": 0}, "max_tokens"), ({"seed": -1}, "seed"), ({"seed": 2**70}, "more than 64 bits")],
)
def test_an_option_out_of_range_is_refused_before_it_is_sent(options: Options, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        check_options(make_options(options))


def test_the_tokenizer_is_fetched_once(
    connect: Connect, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all streams and clients of the process; the next process has it from disk."""
    fetched = []
    add = tokenizer_cache.add

    def counted(bundle: TokenizerBundle) -> Tokenizer:
        fetched.append(bundle.hash)
        return add(bundle)

    monkeypatch.setattr(tokenizer_cache, "add", counted)

    async def scenario() -> None:
        for _ in range(2):
            async with connect(worker.address) as client:
                await asyncio.gather(*(client.generate("a", max_tokens=1).read() for _ in range(5)))
                assert (await client.tokenizer()) is (await client.tokenizer())
        assert len(fetched) == 1
        tokenizer_cache.clear()
        async with connect(worker.address) as client:
            assert (await client.tokenizer()).hash == fetched[0]
        assert len(fetched) == 1

    asyncio.run(scenario())


def test_the_worker_can_be_asked_about(connect: Connect, worker: FakeWorker) -> None:
    """describe, status, metrics, ping and wait_ready."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            description = await client.describe()
            assert description.state == "ready"
            assert description.model.name == "fake"
            assert (await client.status()).state == "ready"
            assert "zmqengine_" in await client.metrics()
            assert "zmqengine_" in (await client.ask(GetMetrics, Metrics)).text
            with pytest.raises(ZmqEngineError, match="not Description"):
                await client.ask(Ping, Description)
            assert 0 < await client.ping() < HANG_S
            assert (await client.wait_ready(5.0)).epoch == description.epoch

    asyncio.run(scenario())


def test_progress_of_a_long_prompt_is_told(connect: Connect) -> None:
    """`stream.progress` is None before the first report and complete after the prefill."""
    with FakeWorker(FakeEngineConfig(prefill_chunk=10, step_ms=1.0)) as worker:

        async def scenario() -> None:
            async with connect(worker.address) as client:
                stream: Any = client.generate_tokens([1] * 200, max_tokens=3)
                before = stream.progress
                await stream.read()
                assert before is None
                assert stream.progress.total == 200
                assert 100 < stream.progress.done <= 200

        asyncio.run(scenario())


def test_a_worker_that_is_not_there_is_told_in_time(connect: Connect) -> None:
    """Nothing hangs: every kind of call ends with WorkerLost, which says what to do."""

    async def scenario() -> None:
        async with connect("ipc:///tmp/zmqengine-nobody/x/ctl", connect_timeout_s=0.3) as client:
            calls = [
                client.describe(),
                client.wait_ready(),
                client.tokenizer(),
                client.generate_tokens([1]).read(),
                client.generate("a").read(),
                client.generate_tokens([1], max_tokens=3).read(),
            ]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, WorkerLost), result
                assert "zmqengine worker" in result.message

    asyncio.run(scenario())


def test_a_closed_client_refuses_and_its_streams_have_ended(connect: Connect, worker: FakeWorker) -> None:
    """Closing is idempotent, aborts what runs and wakes who waits."""

    async def scenario() -> None:
        client = connect(worker.address)
        stream = client.generate_tokens([1], max_tokens=4000)
        await stream.__anext__()
        reading = asyncio.ensure_future(stream.read())
        await client.close()
        assert (await reading).finish == "abort"
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.generate_tokens([1])
        with pytest.raises(RuntimeError, match="closed"):
            await client.describe()
        async with connect(worker.address) as other:
            await until(lambda: rows_free(other))

    asyncio.run(scenario())


def test_a_closed_client_leaves_no_socket_to_the_garbage_collector(
    worker: FakeWorker, recwarn: pytest.WarningsRecorder
) -> None:
    """Python warns of such sockets (`-X dev`), and a test run that turns warnings into errors fails."""
    client = Client(worker.address)
    assert client.generate_tokens([1], max_tokens=1).read().finish == "length"
    client.close()
    del client
    gc.collect()
    assert [warning for warning in recwarn if warning.category is ResourceWarning] == []


def test_a_call_that_a_closing_client_drops_does_not_wait(worker: FakeWorker) -> None:
    """Between the look whether the client is open and the call, another thread may close it."""
    client = Client(worker.address)
    post = client._driver.post

    def late(command: Callable[[float], None]) -> None:
        client.close()
        post(command)

    client._driver.post = late  # type: ignore[method-assign]
    outcomes = SimpleQueue[str]()

    def call() -> None:
        try:
            client.ping()
        except RuntimeError as error:
            outcomes.put(str(error))

    threading.Thread(target=call, daemon=True).start()
    assert outcomes.get(timeout=HANG_S) == "the client is closed"


def test_an_async_client_refuses_another_loop(worker: FakeWorker) -> None:
    """Its sockets are watched by the loop of the first call: in another one nothing would ever come."""
    client = AsyncClient(worker.address)

    async def first() -> Any:
        assert await client.ping() >= 0
        return client.generate_tokens([1], max_tokens=4000)

    async def second(stream: Any) -> None:
        with pytest.raises(RuntimeError, match="event loop of its first call"):
            client.generate("hello")
        for call in (stream.read, client.ping, client.close):
            with pytest.raises(RuntimeError, match="event loop of its first call"):
                await asyncio.wait_for(call(), HANG_S)

    with closing(asyncio.new_event_loop()) as loop:
        stream = loop.run_until_complete(first())
        asyncio.run(second(stream))
        loop.run_until_complete(client.close())
    asyncio.run(client.close())


def test_a_task_reads_on_at_once_where_a_cancelled_one_waited(worker: FakeWorker) -> None:
    """The cancelled task ends later, and takes nothing of the next one's wait along."""

    async def read(stream: Any) -> list[int]:
        waiting = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        first = await stream.__anext__()
        return first.tokens + [token async for chunk in stream for token in chunk.tokens]

    async def scenario() -> None:
        async with AsyncClient(worker.address) as client:
            stream = client.generate_tokens([1], max_tokens=40, seed=0)
            tokens = await asyncio.wait_for(read(stream), HANG_S)
            assert tokens == worker.expected_tokens([1], 40)

    asyncio.run(scenario())


def test_a_second_task_that_waits_for_a_stream_is_refused() -> None:
    """One of the two would wait for ever."""

    async def scenario() -> None:
        mailbox = AsyncMailbox()
        waiting = [asyncio.ensure_future(mailbox.wait()) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [RuntimeError]

    asyncio.run(scenario())


def test_a_second_thread_that_waits_for_a_stream_is_refused() -> None:
    """The first one waits on, and gets what comes."""
    mailbox, outcomes = Mailbox(), SimpleQueue[object]()

    def wait() -> None:
        try:
            outcomes.put(mailbox.wait())
        except RuntimeError as error:
            outcomes.put(error)

    for _ in range(2):
        threading.Thread(target=wait, daemon=True).start()
    assert isinstance(outcomes.get(timeout=HANG_S), RuntimeError)
    notifier = Notifier()
    mailbox.put(notifier)
    assert outcomes.get(timeout=HANG_S) == [notifier]


def test_a_second_client_with_the_same_secret_takes_over(connect: Connect, worker: FakeWorker) -> None:
    """The first one is told: Fenced, for what runs and for what comes."""

    async def scenario() -> None:
        events: list[str] = []
        secret = b"0123456789abcdef"
        options = {"session_secret": secret}
        async with connect(
            worker.address, on_event=lambda event: events.append(event.kind), **options
        ) as first:
            stream = first.generate_tokens([1], max_tokens=4000)
            await stream.__anext__()
            async with connect(worker.address, **options) as second:
                await second.generate_tokens([2], max_tokens=1).read()
                with pytest.raises(Fenced):
                    await first.generate_tokens([3], max_tokens=1).read()
                with pytest.raises(Fenced):
                    await stream.read()
                with pytest.raises(Fenced):
                    await first.generate_tokens([3], max_tokens=1).read()
            assert events == ["connected", "fenced"]

    asyncio.run(scenario())


def test_a_failing_on_event_disturbs_nothing(connect: Connect, worker: FakeWorker) -> None:
    """The caller's mistake is logged and the client goes on."""

    async def scenario() -> None:
        async with connect(worker.address, on_event=lambda _: 1 / 0) as client:
            assert len((await client.generate_tokens([1], max_tokens=5).read()).tokens) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_three_hundred_instant_requests_lose_nothing(connect: Connect, drop: float) -> None:
    """Tokens published the instant they are inserted; then the same with a publisher that drops 10 % of its frames."""
    engine = FakeEngineConfig(instant=True, rows_max=8)
    with FakeWorker(engine, fault_drop_frames=drop) as worker:

        async def scenario() -> None:
            async with connect(worker.address) as client:
                streams = [
                    client.generate_tokens([1, number], max_tokens=30, seed=0) for number in range(300)
                ]
                async for _ in client.select(streams):
                    continue
                for number, stream in enumerate(streams):
                    assert stream.result.tokens == worker.expected_tokens([1, number], 30), number
                assert (client.counters.frames_lost > 0) == (drop > 0)

        asyncio.run(scenario())
