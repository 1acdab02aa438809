"""Rerank: documents in the order of their relevance to a query."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.errors import BadRequest, ContextExceeded
from zmqengine_client.aio.embedding import AsyncEmbedding
from zmqengine_client.aio.in_flight import AsyncInFlight
from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.model_tokenizer import AsyncModelTokenizer
from zmqengine_client.aio.waiting import off_loop
from zmqengine_client.core.embedding import BATCH, EmbedOptions, check_list
from zmqengine_client.core.request import new_request, set_token_prompt
from zmqengine_client.text.long_texts import beginning
from zmqengine_client.text.reranking import Answers, Reranked, probability, question, ranked
from zmqengine_client.text.text_source import pair_source
from zmqengine_client.text.tokenizer import Tokenizer

IN_FLIGHT = 64
"""Documents of one call in flight to a generating reranker."""


class AsyncReranking:
    """Reranks of one client: by a scoring head, or by a generating model such as Qwen3-Reranker."""

    def __init__(self, driver: LoopDriver, tokenizer: AsyncModelTokenizer, embedding: AsyncEmbedding) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._embedding = embedding

    async def rerank(
        self, query: str, documents: Sequence[str], instruction: str | None, options: EmbedOptions
    ) -> Reranked:
        """All documents, the best first. Raises `BadRequest` for a model that is no reranker."""
        check_list("documents", documents)
        model, limits = await self._embedding.served()
        tokenizer = await self._tokenizer.get()
        if model.labels:
            source = pair_source(query, documents)
            scores = await self._embedding.vectors(len(documents), source, "score", None, options)
            return Reranked(
                ranked([probability(logits) for logits in scores.vectors.tolist()]), scores.tokens
            )
        yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
        if tokenizer.facts.get("reranker") != "qwen3" or yes is None or no is None:
            raise BadRequest(f"the model {model.name} makes no scores: it is no reranker")
        return await self._ask(
            Answers(yes, no), query, documents, instruction, options, limits.prompt_tokens_max, tokenizer
        )

    async def _ask(
        self,
        answers: Answers,
        query: str,
        documents: Sequence[str],
        instruction: str | None,
        options: EmbedOptions,
        tokens_max: int,
        tokenizer: Tokenizer,
    ) -> Reranked:
        on_progress = options.get("on_progress")
        in_flight = AsyncInFlight(self._driver)
        scores: list[float] = []
        tokens = 0
        try:
            for index, document in enumerate(documents):
                truncate = bool(options.get("truncate", False))
                parts = question(query, document, instruction)
                prompt = await off_loop(prompt_ids, tokenizer, parts, tokens_max, index, truncate)
                tokens += len(prompt)
                request = new_request(
                    {
                        **answers.options,
                        "priority": options.get("priority", BATCH),
                        "deadline_ms": options.get("deadline_ms"),
                    }
                )
                set_token_prompt(request, prompt)
                in_flight.start(request)
                while len(in_flight) >= IN_FLIGHT or (in_flight and index + 1 == len(documents)):
                    done = await in_flight.take_oldest()
                    assert done.logprobs
                    scores.append(answers.score(done.logprobs[0]))
                    if on_progress is not None:
                        on_progress(len(scores), len(documents))
        finally:
            in_flight.abort()
        return Reranked(ranked(scores), tokens)


def prompt_ids(
    tokenizer: Tokenizer, parts: tuple[str, str, str], tokens_max: int, index: int, truncate: bool
) -> list[int]:
    """The prompt for one document; `truncate` cuts the document to fit the context.

    Raises `ContextExceeded`.
    """
    begun = [beginning(tokenizer, part, tokens_max) for part in parts]
    before, document, after = (tokenizer.encode(part, add_special_tokens=False) for part in begun)
    room = tokens_max - len(before) - len(after)
    if room < 1 or (len(document) > room and not truncate):
        count = f"{'' if len(begun[1]) == len(parts[1]) else 'over '}{len(document)}"
        raise ContextExceeded(
            f"document {index} has {count} tokens, the query leaves it {max(0, room)} of the {tokens_max} that "
            "the model reads: shorten it, or ask for it to be truncated"
        )
    return [*before, *document[:room], *after]
