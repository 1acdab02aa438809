"""A request as chunks of text, without waiting: the base of the text streams of both halves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import TokenLogprob
from zmqengine_client.core.chunks import Completion, TextChunk, TokenChunk
from zmqengine_client.core.request import Request, TokenReader
from zmqengine_client.text.detokenizer import ByteDetokenizer, Detokenizer
from zmqengine_client.text.stop_strings import StopAutomaton, StopStrings
from zmqengine_client.text.tokenizer import Tokenizer


class TextReader:
    """The text of a request up to its end token or its first stop string after `min_tokens`.

    The whole text does not depend on how tokens were cut into chunks.
    """

    def __init__(self, request: Request, stops: Sequence[str]) -> None:
        self.request = request
        self._reader = TokenReader(request)
        self._stops = StopStrings(StopAutomaton(stops))
        self._one_by_one = bool(stops)
        self._min_tokens = request.options.sampling.min_tokens
        self._detokenizer: Detokenizer | ByteDetokenizer | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._text: list[str] = []
        self._first_index = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished = False

    def start(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer. `take` returns None before."""
        options = self.request.options
        eos = frozenset() if options.ignore_eos else tokenizer.eos_token_ids
        self._end_ids = eos | frozenset(options.stop_token_ids)
        self._detokenizer = tokenizer.detokenizer()

    def take(self) -> TextChunk | None:
        """The text that became final since the last call, or None. See `TokenReader.take`."""
        if self._finished:
            return None
        text = ""
        ended = self.request.ended
        chunk = self._reader.take() if self._detokenizer is not None else None
        if chunk is not None:
            text = self._read(chunk)
        # Read before the tokens: `end` is set after the last of them.
        if self._stops.match is not None or ended:
            text += self._flush()
        self._text.append(text)
        if not text and not (self._finished and self._tokens):
            return None
        logprobs = self._logprobs if self.request.logprobs is not None else None
        result = TextChunk(text, self._tokens, logprobs, self._first_index)
        self._first_index += len(self._tokens)
        self._tokens, self._logprobs = [], []
        return result

    @property
    def finished(self) -> bool:
        """Whether all of the output has been taken."""
        return self._finished

    @property
    def wants_abort(self) -> bool:
        """Whether a stop string was found while the worker still generates."""
        return self._stops.match is not None and not self.request.ended

    def completion(self) -> Completion:
        """The outcome. After a stop string it holds the tokens up to the one that completed it."""
        completion = msgspec.structs.replace(self.request.completion(), text="".join(self._text))
        match = self._stops.match
        if match is None:
            return completion
        tokens = completion.tokens[: self._first_index]
        return msgspec.structs.replace(
            completion, finish="stop", message="", tokens=tokens, stop_string=match
        )

    def failure(self) -> ZmqEngineError | None:
        """The error the request ended with; None if the text was complete before."""
        return self.request.failure() if self._stops.match is None else None

    def _read(self, chunk: TokenChunk) -> str:
        assert self._detokenizer is not None
        tokens = chunk.tokens
        # The token that ends an output is its last one, and has no text.
        with_text = tokens[:-1] if tokens[-1] in self._end_ids else tokens
        used = len(tokens)
        if not self._one_by_one:
            text = self._detokenizer.push(with_text)
        else:
            pieces = []
            for index, token in enumerate(with_text):
                text = self._detokenizer.push((token,))
                is_searched = chunk.first_index + index >= self._min_tokens
                pieces.append(self._stops.push(text) if is_searched else text)
                if self._stops.match is not None:
                    used = index + 1
                    break
            text = "".join(pieces)
        self._tokens += tokens[:used]
        if chunk.logprobs is not None:
            self._logprobs += chunk.logprobs[:used]
        return text

    def _flush(self) -> str:
        self._finished = True
        if self._detokenizer is None:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
