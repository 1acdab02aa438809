"""Embeds of texts: tokenized off the loop, with a few messages in flight."""

from __future__ import annotations

import sys

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Description, Limits, ModelCard, VectorKind
from zmqengine.request_rules import vector_width
from zmqengine_client.aio.in_flight import AsyncInFlight
from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.model_tokenizer import AsyncModelTokenizer
from zmqengine_client.aio.questions import AsyncQuestions
from zmqengine_client.aio.waiting import off_loop_unless
from zmqengine_client.core.connection import Connection
from zmqengine_client.core.embedding import (
    IN_FLIGHT,
    Embedded,
    EmbedOptions,
    embed_of,
    messages,
    request_of,
    to_array,
)
from zmqengine_client.text.text_source import KNOWN_CHARACTERS, SHORT_CHARACTERS, TextSource

SLICE = 1024
"""Texts tokenized in one call."""

SHORT_BYTES = 1 << 17
"""Bytes of vectors that are copied to new pages in 0.1 to 0.3 ms: a thread takes as long to be woken."""


class AsyncEmbedding:
    """The embeds of one client."""

    def __init__(
        self,
        driver: LoopDriver,
        tokenizer: AsyncModelTokenizer,
        questions: AsyncQuestions,
        connection: Connection,
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._questions = questions
        self._connection = connection

    async def served(self) -> tuple[ModelCard, Limits]:
        """The worker's model and limits, once it is ready."""
        model, limits = self._connection.model, self._connection.limits
        if model is not None and limits is not None:
            return model, limits
        described: Description = await self._questions.wait_ready(None)
        assert described.model is not None
        assert described.limits is not None
        return described.model, described.limits

    async def vectors(
        self,
        count: int,
        source: TextSource,
        output: VectorKind,
        dimensions: int | None,
        options: EmbedOptions,
    ) -> Embedded:
        """Vectors of `count` texts, in their order.

        An error, and the cancellation of the task, abort the requests in flight.
        """
        model, limits = await self.served()
        if not limits.texts_max:
            raise BadRequest(f"the model {model.name} makes no embeddings and no scores")
        tokenizer = await self._tokenizer.get()
        on_progress = options.get("on_progress")
        in_flight = AsyncInFlight(self._driver)
        vectors: list[bytes] = []
        tokens = 0
        short = source.characters <= (KNOWN_CHARACTERS if tokenizer.knows_words else SHORT_CHARACTERS)

        async def take_oldest() -> None:
            nonlocal vectors
            vectors += (await in_flight.take_oldest()).vectors
            if on_progress is not None:
                on_progress(len(vectors), count)

        try:
            for start in range(0, count, SLICE):
                stop = min(count, start + SLICE)
                texts = await off_loop_unless(
                    short, source.encode, tokenizer, start, stop, limits.context_tokens_max
                )
                truncate = bool(options.get("truncate", False))
                for part in messages(texts, limits, tokenizer.tail, truncate=truncate, first=start):
                    tokens += sum(len(text.ids) for text in part)
                    in_flight.start(request_of(embed_of(part, output, dimensions, options)))
                    if len(in_flight) >= IN_FLIGHT:
                        await take_oldest()
            while in_flight:
                await take_oldest()
        finally:
            in_flight.abort()
        width = len(vectors[0]) // 4 if vectors else vector_width(output, dimensions, model)
        # The import of numpy takes a tenth of a second.
        short = "numpy" in sys.modules and 4 * width * len(vectors) <= SHORT_BYTES
        return Embedded(await off_loop_unless(short, to_array, vectors, width), tokens)
