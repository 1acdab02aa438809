"""A stand-in for `AsyncClient` whose model says what the test wants, token by token.

For what an engine cannot be made to say: tool calls, reasoning, odd bytes. Everything else is tested with a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import tokenizers

from tests.http.front import Front, Reply, post, serving
from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE, fake_tokenizer_json
from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import (
    Description,
    Limits,
    ModelCard,
    Progress,
    ThinkingMax,
    TokenizerBundle,
    TokenLogprob,
    WorkerState,
)
from zmqengine_client.core.chunks import Completion, PromptProgress, TokenChunk
from zmqengine_client.core.embedding import Embedded
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http import HttpConfig

VOCAB_SIZE = 300
CONTEXT_TOKENS = 4096
END_TOKEN = 0
TOOLS_TEMPLATE = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE
# A template that tells whether it was asked to think.
THINKING_SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}off{% elif enable_thinking %}on{% endif %}"
)
USER: dict[str, object] = {"role": "user", "content": "Hi"}
Say = Callable[[str], str]
_Entered = TypeVar("_Entered", bound="ScriptedFront")


class ScriptedClient:
    """Says `say(prompt)`, then ends. If `say` raises, the stream fails before its first token."""

    def __init__(
        self,
        say: Say,
        *,
        name: str = "scripted",
        template: str = TOOLS_TEMPLATE,
        facts: dict[str, str | bool | int] | None = None,
        chunk_tokens: int = 1,
        special: Sequence[str] = (),
        context_tokens: int = CONTEXT_TOKENS,
        step_s: float = 0.0,
    ) -> None:
        self.say = say
        self.name = name
        self.chunk_tokens = chunk_tokens
        self.context_tokens = context_tokens
        self.step_s = step_s
        self.bounds_thinking = True
        self.drafts: dict[str, tuple[int, int]] = {}
        self.special_tokens = len(special)
        self.state: WorkerState = "ready"
        self.prompts: list[str] = []
        self.options: list[dict[str, object]] = []
        self.streams: list[ScriptedStream] = []
        tokenizer = tokenizers.Tokenizer.from_str(fake_tokenizer_json(VOCAB_SIZE).decode())
        tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
        self.bundle = TokenizerBundle(
            call=0,
            hash=f"{name}{template}{facts}",
            tokenizer_json=tokenizer.to_str().encode(),
            chat_template=template,
            eos_token_ids=[END_TOKEN],
            facts=facts or {},
        )
        self._tokenizer = Tokenizer(self.bundle)

    async def describe(self) -> Description:
        card = ModelCard(
            self.name, VOCAB_SIZE + self.special_tokens, self.context_tokens, [END_TOKEN], self.bundle.hash, 0
        )
        limits = Limits(
            2**24, self.context_tokens - 1, self.context_tokens, 64, 64, 64, thinking_max=self.bounds_thinking
        )
        return Description(
            call=0, protocol=(1, 1), version="0", name=self.name, pid=1, epoch=bytes(8), state=self.state,
            progress=Progress(self.state), cmd="", out="", model=card, limits=limits,
        )  # fmt: skip

    async def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def close(self) -> None:
        for stream in self.streams:
            stream.close()

    async def embed_counted(self, texts: Sequence[str], **options: object) -> Embedded:
        """Vectors of two floats, which say nothing."""
        return Embedded(np.ones((len(texts), 2), np.float32), len(texts))

    def generate_tokens(self, prompt: Sequence[int], **options: object) -> ScriptedStream:
        text = self._tokenizer.decode(prompt)
        self.prompts.append(text)
        self.options.append(options)
        stream = ScriptedStream(self, text, list(prompt), options)
        self.streams.append(stream)
        return stream


class ScriptedStream:
    """What `AsyncClient.generate_tokens` returns."""

    def __init__(
        self, client: ScriptedClient, text: str, prompt: list[int], options: dict[str, object]
    ) -> None:
        self._client = client
        self._text = text
        self._prompt = prompt
        self._options = options
        self._sent: list[int] = []
        self._finish = ""
        self.closed = False
        self.progress: PromptProgress | None = None

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        said = self._client.say(self._text)
        tokens = [*self._client._tokenizer.encode(said, add_special_tokens=False), END_TOKEN]
        stops = set(self._options.get("stop_token_ids") or ())  # type: ignore[call-overload]
        tokens = _bounded(tokens, self._options.get("thinking_max"))
        stopped = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
        tokens = tokens[: stopped + 1]
        limit = self._options["max_tokens"] or self._client.context_tokens - len(self._prompt)
        cut = tokens[: int(limit)]  # type: ignore[call-overload]
        step = self._client.chunk_tokens
        for place in range(0, len(cut), step):
            await asyncio.sleep(self._client.step_s)
            if self.closed:
                return
            chunk = cut[place : place + step]
            logprobs = (
                None
                if self._options["logprobs"] is None
                else [TokenLogprob(-0.5, [(t, -0.5), (65, -1.5)]) for t in chunk]
            )
            self._sent += chunk
            if len(self._sent) == len(cut):
                self._finish = "stop" if cut[-1] in (END_TOKEN, *stops) else "length"
            yield TokenChunk(place, chunk, logprobs)

    def close(self) -> None:
        self.closed = True

    @property
    def ended(self) -> bool:
        return self.closed or bool(self._finish)

    @property
    def result(self) -> Completion:
        assert self._finish or self.closed
        finish, drafts = self._finish or "abort", self._client.drafts
        return Completion(finish, self._sent, len(self._prompt), 3, 0, "r", drafts=drafts)


def _bounded(tokens: list[int], bound: object) -> list[int]:
    """The tokens within a bound on reasoning: what the model had to say after the bound is its answer alone."""
    if not isinstance(bound, ThinkingMax):
        return tokens
    matcher, said = thinking_bound(**msgspec.structs.asdict(bound)).start(()), list[int]()
    while tokens:
        token = matcher.only
        if token is None:
            token, tokens = tokens[0], tokens[1:]
        elif token == bound.closer[0]:
            place = next(
                (i for i in range(len(tokens)) if tokens[i : i + len(bound.closer)] == bound.closer), None
            )
            tokens = [END_TOKEN] if place is None else tokens[place + len(bound.closer) :]
        matcher.follow(token)
        said.append(token)
    return said


def failing(error: ZmqEngineError) -> Say:
    """A model whose every stream fails before its first token."""

    def say(prompt: str) -> str:
        raise error

    return say


class ScriptedFront:
    """A front-end on a model that says `text`; `client` keeps what that model was asked.

    `options` are those of `HttpConfig`.
    """

    def __init__(
        self,
        template: str = TOOLS_TEMPLATE,
        *,
        text: str = "yes",
        facts: Any = None,
        special: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.text = text
        self.client = ScriptedClient(
            lambda prompt: self.text, template=template, facts=facts, special=special
        )
        self._serving = serving(HttpConfig(**options), lambda address, on_event: self.client)

    def __enter__(self: _Entered) -> _Entered:
        self.front: Front = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def chat(self, **body: object) -> Reply:
        """Ask for a chat completion, by default about `USER`."""
        return post(self.front, "/v1/chat/completions", {"messages": [USER], **body})
