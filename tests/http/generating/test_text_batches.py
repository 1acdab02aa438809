"""Texts of requests that come together are tokenised together, and nobody gets another's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from zmqengine.engine.fake.fake_tokenizer import fake_tokenizer_json
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.errors import BadRequest
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.prompt import prompts
from zmqengine_http.prompt.prompts import TextBatches

HALF_A_PAIR = "\ud83d"
BROKEN = "broken"


class Panic(BaseException):
    """What a library in Rust raises when it panics is no `Exception`."""


class CountingTokenizer(Tokenizer):
    """Notes how many texts each call has, and has a bug that one text brings out."""

    def __init__(self) -> None:
        super().__init__(
            TokenizerBundle(
                call=0,
                hash="h",
                tokenizer_json=fake_tokenizer_json(300),
                chat_template=None,
                eos_token_ids=[0],
                special_tokens={},
            )
        )
        self.calls: list[int] = []

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.calls.append(len(texts))
        if BROKEN in texts:
            raise Panic("a bug in the tokenizer")
        return super().encode_all(texts, add_special_tokens)


def test_what_comes_in_one_turn_is_one_call_and_each_gets_its_own() -> None:
    """Two models at once are two calls; what comes later is another one."""
    first, second = CountingTokenizer(), CountingTokenizer()

    async def run() -> None:
        batches = TextBatches()
        texts = [[f"text {place}"] * (1 + place % 3) for place in range(40)]
        encoded = await asyncio.gather(
            *(
                batches.encode(first if place % 2 else second, each, add_special_tokens=True)
                for place, each in enumerate(texts)
            )
        )
        assert encoded == [[first.encode(text) for text in each] for each in texts]
        assert await batches.encode(first, ["later"], add_special_tokens=False) == [first.encode("later")]

    asyncio.run(run())
    assert first.calls == [sum(1 + place % 3 for place in range(1, 40, 2)), 1]
    assert second.calls == [sum(1 + place % 3 for place in range(0, 40, 2))]


def test_what_comes_turn_after_turn_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests do that are sent at once, each read a little later; a turn that brings nobody ends it."""
    # Whatever a turn takes on a busy machine.
    monkeypatch.setattr(prompts, "GATHER_S", 60.0)
    tokenizer = CountingTokenizer()

    async def run() -> None:
        batches = TextBatches()
        encoding = []
        for place in range(10):
            encoding.append(
                asyncio.ensure_future(batches.encode(tokenizer, [f"text {place}"], add_special_tokens=True))
            )
            await asyncio.sleep(0)
        assert await asyncio.gather(*encoding) == [[tokenizer.encode(f"text {place}")] for place in range(10)]

    asyncio.run(run())
    assert tokenizer.calls == [10]


def test_nobody_waits_for_ever_for_those_who_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is tokenised in time, whoever comes."""
    monkeypatch.setattr(prompts, "GATHER_S", 0.0)
    tokenizer = CountingTokenizer()

    async def run() -> None:
        batches = TextBatches()
        first = asyncio.ensure_future(batches.encode(tokenizer, ["first"], add_special_tokens=True))
        others = []
        while not first.done():
            others.append(
                asyncio.ensure_future(batches.encode(tokenizer, ["other"], add_special_tokens=True))
            )
            await asyncio.sleep(0)
        await asyncio.gather(*others)

    asyncio.run(run())
    assert len(tokenizer.calls) > 1


def test_one_that_is_no_text_fails_alone_and_one_that_left_disturbs_nobody() -> None:
    """The library refuses a batch as a whole."""
    tokenizer = CountingTokenizer()

    async def run() -> None:
        batches = TextBatches()
        good, bad, broken, left = (
            asyncio.ensure_future(batches.encode(tokenizer, [text], add_special_tokens=True))
            for text in ("good", HALF_A_PAIR, BROKEN, "left")
        )
        await asyncio.sleep(0)
        left.cancel()
        assert await asyncio.wait_for(good, 60) == [tokenizer.encode("good")]
        with pytest.raises(BadRequest, match="not valid Unicode"):
            await asyncio.wait_for(bad, 60)
        with pytest.raises(Panic, match="a bug in the tokenizer"):
            await asyncio.wait_for(broken, 60)
        assert left.cancelled()

    asyncio.run(run())
