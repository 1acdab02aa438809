"""`prefill_keep` of both clients: tokens that are read, fields of the completion, refusals before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.errors import BadRequest
from zmqengine.request_rules import check_keep
from zmqengine.testing import FakeWorker
from zmqengine_client import Completion

Connect = Callable[..., Any]
PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def keeping() -> Iterator[FakeWorker]:
    """A worker whose engine reads the last tokens of a prompt."""
    with FakeWorker(FakeEngineConfig(keeps=True, prompt_cache_bytes=1 << 20)) as worker:
        yield worker


def completed(connect: Connect, worker: FakeWorker, **options: Any) -> Completion:
    """The completion of the prompt."""

    async def read() -> Any:
        async with connect(worker.address) as client:
            return await client.generate_tokens(PROMPT, max_tokens=5, seed=0, **options).read()

    done = asyncio.run(read())
    assert isinstance(done, Completion)
    return done


def test_a_share_of_the_prompt_is_read(connect: Connect, keeping: FakeWorker) -> None:
    """The completion says how much, beside the length of the whole prompt."""
    done = completed(connect, keeping, prefill_keep=0.3)
    assert done.tokens == keeping.expected_tokens(PROMPT[-12:], 5)
    assert (done.prompt_tokens, done.kept_tokens, done.cached_tokens) == (40, 12, 0)
    whole = completed(connect, keeping)
    assert whole.tokens == keeping.expected_tokens(PROMPT, 5)
    assert whole.kept_tokens == 0


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan"), "half"])
def test_a_share_outside_its_range_is_refused(connect: Connect, keeping: FakeWorker, share: Any) -> None:
    """By its name."""
    with pytest.raises(BadRequest, match="prefill_keep"):
        completed(connect, keeping, prefill_keep=share)


def test_what_has_to_be_read_whole_is_refused(connect: Connect, keeping: FakeWorker) -> None:
    """A pinned prompt has to be in the prefix cache, which such a prompt never enters."""
    with pytest.raises(BadRequest, match=r"prefill_keep.*pin"):
        completed(connect, keeping, prefill_keep=0.5, pin=True)
    with pytest.raises(BadRequest, match=r"prefill_keep.*images"):
        check_keep(0.5, allowed=True, images=True, pin=False)


def test_a_worker_without_a_draft_model_is_not_asked(connect: Connect, worker: FakeWorker) -> None:
    """The refusal names the worker's option."""
    with pytest.raises(BadRequest, match=r"prefill_keep.*--draft"):
        completed(connect, worker, prefill_keep=0.5)
