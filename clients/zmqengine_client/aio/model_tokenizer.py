"""The tokenizer of the model that the worker serves now."""

from __future__ import annotations

from zmqengine.protocol.messages import GetTokenizer, Limits, TokenizerBundle
from zmqengine_client.aio.questions import AsyncQuestions
from zmqengine_client.aio.waiting import Lock, off_loop
from zmqengine_client.core.connection import Connection
from zmqengine_client.text import tokenizer_cache
from zmqengine_client.text.tokenizer import Tokenizer


class AsyncModelTokenizer:
    """Finds the tokenizer once, and again when another model is served."""

    def __init__(self, questions: AsyncQuestions, connection: Connection) -> None:
        self._questions = questions
        self._connection = connection
        self._known: Tokenizer | None = None
        self._lock = Lock()

    async def limits(self) -> Limits:
        """The limits of the worker, once it is ready."""
        limits = self._connection.limits or (await self._questions.wait_ready(None)).limits
        assert limits is not None
        return limits

    async def get(self) -> Tokenizer:
        """The tokenizer: from this process, from disk, or fetched from the worker."""
        async with self._lock:
            model, known = self._connection.model, self._known
            if known is not None and (model is None or model.tokenizer_hash == known.hash):
                return known
            described = (await self._questions.wait_ready(None)).model
            tokenizer = None
            if described is not None:
                tokenizer = await off_loop(tokenizer_cache.find, described.tokenizer_hash)
            if tokenizer is None:
                bundle = await self._questions.ask(GetTokenizer, TokenizerBundle)
                tokenizer = await off_loop(tokenizer_cache.add, bundle)
            self._known = tokenizer
            return tokenizer
