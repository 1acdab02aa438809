"""The tokens of one output as content, reasoning and tool calls, up to its end token or its first stop string."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from zmqengine_client.text.reasoning import TAIL_TOKENS
from zmqengine_client.text.stop_strings import StopAutomaton, StopStrings
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import Delta, Markers, TextSplitter, find_markers, make_splitter
from zmqengine_client.text.tool_calls.deltas import Kind


class AnswerText:
    """`push` the tokens as they come, then `finish`; after `stopped` no further text belongs to the output.

    `splitter` finds reasoning and tool calls; without one all text is content. With one, special tokens stay in the
    text: many models mark reasoning and calls with them. `end_token_ids` end the output and have no text. No stop
    string is found in the reasoning, nor in the text of the first `unsearched_tokens`.

    While `may_end_early`, tokens are pushed one by one: any of them may be the last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopAutomaton,
        end_token_ids: frozenset[int],
        *,
        splitter: TextSplitter | None = None,
        unsearched_tokens: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=splitter is None)
        self._splitter = splitter
        self._automaton = stops
        self._stops = StopStrings(stops)
        self._unsearched = unsearched_tokens
        self._searching = not unsearched_tokens
        self._kind: Kind = "content"
        self._end_token_ids = end_token_ids
        self.may_end_early = splitter is not None or bool(stops)
        self.stop_token_ids = end_token_ids - tokenizer.eos_token_ids

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return self._stops.match

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def cut_call(self) -> bool:
        """Whether a call is not whole, once the output has ended: it was cut, or is malformed."""
        stopped_within = self.stopped and self._kind == "call_text"
        return stopped_within or (self._splitter is not None and self._splitter.incomplete_call)

    def visible(self, tokens: list[int]) -> list[int]:
        """The tokens without a trailing end token."""
        return tokens[:-1] if tokens and tokens[-1] in self._end_token_ids else tokens

    def push(self, tokens: list[int]) -> list[Delta]:
        """The output that these tokens complete."""
        self._searching = self._unsearched <= 0
        self._unsearched -= len(tokens)
        text = self._detokenizer.push(self.visible(tokens))
        if not self.may_end_early:
            return _piece("content", text)
        return self._up_to_stop(self._split(text))

    def finish(self) -> list[Delta]:
        """The output that was held back until the end."""
        if self.stopped:
            return []
        deltas = self._split(self._detokenizer.finish())
        if self._splitter is not None:
            deltas += self._splitter.finish()
        return self._up_to_stop(deltas) + self._held_back()

    def _split(self, text: str) -> list[Delta]:
        if self.stopped:
            return []
        return _piece("content", text) if self._splitter is None else self._splitter.feed(text)

    def _up_to_stop(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas up to a stop string. What may begin one is held back."""
        if not self._automaton:
            return deltas
        kept: list[Delta] = []
        for delta in _in_pieces(deltas):
            if self.stopped:
                return kept
            if delta.kind != self._kind:
                kept += self._held_back()
                self._kind = delta.kind
            if delta.kind in ("content", "call_text") and self._searching:
                kept += _piece(delta.kind, self._stops.push(delta.text))
            else:
                kept.append(delta)
        return kept

    def _held_back(self) -> list[Delta]:
        """The text held back, which began no stop string."""
        if self.stopped:
            return []
        held, self._stops = self._stops.finish(), StopStrings(self._automaton)
        return _piece(self._kind, held)


def chat_splitter(
    tokenizer: Tokenizer, prompt: Sequence[int], schemas: Mapping[str, Mapping[str, object]]
) -> TextSplitter | None:
    """The splitter of the answer to the prompt of a chat, or None if all of its text is content.

    `schemas`: the parameters of the offered functions, by name.
    """
    markers = markers_of(tokenizer)
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False) if markers.think_start else ""
    return make_splitter(markers, reasoning_open=markers.opens_reasoning(tail), tools=schemas)


@functools.lru_cache(maxsize=16)
def markers_of(tokenizer: Tokenizer) -> Markers:
    """The markers of the output of a tokenizer's model."""
    return find_markers(tokenizer.facts, tokenizer.template_for(tools=True))


def _piece(kind: Kind, text: str) -> list[Delta]:
    return [Delta(kind, text)] if text else []


def _in_pieces(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """The deltas, with whole calls as the streamed ones are."""
    for delta in deltas:
        if delta.kind == "call":
            yield Delta("call_start", "", delta.name)
            yield Delta("call_text", delta.text)
            yield Delta("call_end", "")
        else:
            yield delta
