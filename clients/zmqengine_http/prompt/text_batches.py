"""Short texts of requests that come together are tokenised in one call.

The library shares the texts of a call out among the cores of the machine. Sixty requests that come at once then wait
for a tokenizer once and together, and not each behind the others on the one thread of the event loop. They also reach
the worker together, which reads their prompts in one step: one that comes before the others has them wait for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from zmqengine_client.text.tokenizer import Tokenizer

GATHER_S = 0.005
"""How long a text waits at most while each turn of the loop brings another one. One that is alone waits for a turn."""


class _Waiting(NamedTuple):
    """The texts of one request."""

    texts: Sequence[str]
    encoded: asyncio.Future[list[list[int]]]


class TextBatches:
    """Tokenises for the tasks of one event loop, which stands still meanwhile: for short texts only."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Tokenizer, bool], list[_Waiting]] = {}

    async def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The token ids of each text. Raises what the tokenizer raises for these alone (not Unicode: `BadRequest`)."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # Behind all tasks that have their turn now.
            loop.call_soon(self._gather, 0, loop.time() + GATHER_S)
        waiting = _Waiting(texts, loop.create_future())
        self._waiting.setdefault((tokenizer, add_special_tokens), []).append(waiting)
        return await waiting.encoded

    def _gather(self, before: int, until_s: float) -> None:
        """Tokenise, unless somebody has come since the last turn: others may be about to."""
        loop = asyncio.get_running_loop()
        count = sum(map(len, self._waiting.values()))
        if count > before and loop.time() < until_s:
            loop.call_soon(self._gather, count, until_s)
        else:
            self._encode_waiting()

    def _encode_waiting(self) -> None:
        batches, self._waiting = self._waiting, {}
        for (tokenizer, special), batch in batches.items():
            try:
                encoded = iter(tokenizer.encode_all([text for each in batch for text in each.texts], special))
            except BaseException:  # noqa: BLE001 - Panics of the library too: each hears of its own texts.
                for each in batch:
                    _encode_alone(tokenizer, special, each)
                continue
            for each in batch:
                ids = [next(encoded) for _ in each.texts]
                if not each.encoded.done():
                    each.encoded.set_result(ids)


def _encode_alone(tokenizer: Tokenizer, special: bool, waiting: _Waiting) -> None:
    if waiting.encoded.done():
        return
    try:
        waiting.encoded.set_result(tokenizer.encode_all(waiting.texts, special))
    except BaseException as error:  # noqa: BLE001 - Panics of the library too: nobody waits for ever.
        waiting.encoded.set_exception(error)
