"""Refusals on the caller's side: what a chat template would drop in silence, and tracebacks that end at the caller."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from zmqengine.errors import BadRequest, ZmqEngineError
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient, Client

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("messages", "options", "told"),
    [
        ([], {}, "messages: at least one is needed"),
        ([{"role": "usr", "content": "Hello"}], {}, r"messages\[0\].role: 'usr' is none of system"),
        ([*HELLO, {"content": "Hello"}], {}, r"messages\[1\].role: None is none of"),
        ([{"role": "user"}], {}, r"messages\[0\].content: a text, or a list of parts"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content: a text, or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            {},
            r"messages\[0\].content\[0\]: a part is a text",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            {},
            r"messages\[0\].content\[0\].text: a part of type",
        ),
        (["Hello"], {}, r"messages\[0\]: a message is a mapping"),
        (
            [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}, *HELLO],
            {},
            r"messages\[1\].tool_calls\[0\]: a call is",
        ),
        (HELLO, {"tools": [TOOL]}, "tools: this model's chat template takes none"),
        (HELLO, {"tools": [{"name": "look"}]}, r"tools\[0\]: a function is"),
        (HELLO, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: 'messages' cannot be set"),
    ],
)
def test_what_a_template_would_drop_is_refused(
    worker: FakeWorker, messages: Any, options: dict[str, Any], told: str
) -> None:
    """HTTP refused it; here the turn vanished, and the model answered something else."""
    with Client(worker.address) as client, pytest.raises(BadRequest, match=told):
        client.chat(messages, **options).text()
    with Client(worker.address) as client:
        assert client.chat(HELLO, max_tokens=3).read().finish == "length"


def frames_of_ours(error: BaseException) -> list[str]:
    """The functions of the client in a traceback, with all that it was chained to."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=False)
    assert shown.__context__ is None or shown.__suppress_context__
    return [frame.name for frame in shown.stack if "zmqengine_client" in frame.filename]


def looped(client: Client) -> None:
    for _ in client.chat([]):
        raise AssertionError


@pytest.mark.parametrize(
    "ask", [looped, lambda client: client.chat([]).text(), lambda client: client.chat([]).read()]
)
def test_a_traceback_ends_where_the_caller_asked(worker: FakeWorker, ask: Callable[[Client], object]) -> None:
    """It was over thirty lines of the client's own."""
    with Client(worker.address) as client, pytest.raises(ZmqEngineError) as refused:
        ask(client)
    assert len(frames_of_ours(refused.value)) <= 2
    assert traceback.extract_tb(refused.value.__traceback__)[0].filename == __file__


async def looped_in_a_task(client: AsyncClient) -> None:
    async for _ in client.chat([]):
        raise AssertionError


@pytest.mark.parametrize("ask", [looped_in_a_task, lambda client: client.chat([]).text()])
def test_so_it_does_in_a_task(worker: FakeWorker, ask: Callable[[AsyncClient], Awaitable[object]]) -> None:
    """A task of `AsyncClient` shows as few frames."""

    async def scenario() -> None:
        async with AsyncClient(worker.address) as client:
            with pytest.raises(ZmqEngineError) as refused:
                await ask(client)
            assert len(frames_of_ours(refused.value)) <= 2

    asyncio.run(scenario())
