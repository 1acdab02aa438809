"""Parses the harmony channels of gpt-oss: analysis is reasoning, final content, commentary to a function a call.

An output is a sequence of messages `<|start|>assistant<|channel|>CHANNEL
to=functions.NAME<|message|>TEXT<|end|>`. The prompt ends inside the first header. The library openai-harmony
parses tokens, with a vocabulary that it downloads; this parses text.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from zmqengine_client.text.tool_calls.deltas import Delta, earliest, overlap
from zmqengine_client.text.tool_calls.json_arguments import JsonArguments

HEADER_CHARS_MAX = 300
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.-]+)")
_ARGUMENTS = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{)")
_BEFORE_ARGUMENTS = re.compile(r"\s*(?:`{1,3}(?:j(?:s(?:on?)?)?)?\s*)?")
_BUILT_IN = re.compile(r"(?:python|browser|container|assistant|user|system|developer|all)(?:\.|$)")
"""Recipients that are no functions of the caller. Source: https://cookbook.openai.com/articles/openai-harmony."""


class HarmonySplitter:
    """A `TextSplitter` for gpt-oss; without `calls`, a call is content.

    A recipient without `functions.` is a function if it is one of `names`; any but the model's own tools if they are
    not given.
    """

    def __init__(self, *, calls: bool, names: Container[str] | None = None) -> None:
        self.saw_call = False
        self.incomplete_call = False
        self._calls = calls
        self._names = names
        self._function = ""
        self._held = ""
        self._arguments: JsonArguments | None = None
        self._state: Literal["header", "content", "reasoning", "call"] = "header"

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning or its header."""
        return self._state == "reasoning" or (self._state == "header" and "analysis" in self._held)

    def feed(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that are certain."""
        self._held += text
        deltas: list[Delta] = []
        while self._held and (
            self._read_header(deltas) if self._state == "header" else self._read_body(deltas)
        ):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Parse the end of the output; returns the remaining deltas."""
        held, self._held = self._held, ""
        if self._state == "call":
            self.incomplete_call |= self._arguments is None or not self._arguments.done
            if self._arguments is None:
                return [Delta("content", held)] if held else []
            return self._end_call() if self._arguments.done else []
        if self._state == "header":
            return [Delta("content", held)] if held and not held.startswith("<|") else []
        return [Delta(self._state, held)] if held else []

    def _read_header(self, deltas: list[Delta]) -> bool:
        place = self._held.find(_MESSAGE)
        if place < 0:
            if len(self._held) <= HEADER_CHARS_MAX:
                return False
            self._state = "content"
            return True
        header, self._held = self._held[:place], self._held[place + len(_MESSAGE) :]
        channel = _CHANNEL.search(header)
        self._function = self._function_of(header) if self._calls else ""
        if self._function:
            self._state = "call"
        else:
            self._state = "reasoning" if channel and channel[1] == "analysis" else "content"
        return True

    def _function_of(self, header: str) -> str:
        """The function that a message is for, or an empty string."""
        recipient = _RECIPIENT.search(header)
        if not recipient:
            return ""
        name = recipient[2]
        if recipient[1] or (self._names is not None and name in self._names):
            return name
        return name if self._names is None and not _BUILT_IN.match(name) else ""

    def _read_body(self, deltas: list[Delta]) -> bool:
        if self._state == "call" and self._read_arguments(deltas):
            return True
        place, end = earliest(self._held, _ENDS)
        sure = place if end else len(self._held) - max(overlap(self._held, each) for each in _ENDS)
        body = self._held[:sure]
        if self._state == "call" and self._arguments is None:
            if not end and _BEFORE_ARGUMENTS.fullmatch(body) and len(body) <= HEADER_CHARS_MAX:
                return False
            if not body.strip():
                self._held = "{}" + self._held
                return True
            # A message to a function with a text in place of arguments is content.
            self._state = "content"
        self._held = self._held[sure + len(end) :]
        if self._state != "call":
            self._emit(deltas, body)
        if not end:
            return False
        if self._state == "call":
            deltas += self._end_call()
        self._state = "header"
        return True

    def _emit(self, deltas: list[Delta], text: str) -> None:
        if text:
            deltas.append(Delta("reasoning" if self._state == "reasoning" else "content", text))

    def _read_arguments(self, deltas: list[Delta]) -> bool:
        """Stream the arguments in the held text; False after their end, and for text that is no arguments."""
        if self._arguments is None:
            begin = _ARGUMENTS.match(self._held)
            if not begin:
                return False
            self._held = self._held[begin.end() :]
            self._arguments = JsonArguments()
            self.saw_call = True
            deltas.append(Delta("call_start", "", self._function))
        reader = self._arguments
        if reader.done or reader.broken:
            return False
        text, self._held = reader.feed(self._held), ""
        if text:
            deltas.append(Delta("call_text", text))
        if reader.done or reader.broken:
            self._held, reader.rest = reader.rest, ""
        return True

    def _end_call(self) -> list[Delta]:
        """End a message to a function; text behind its arguments is syntax."""
        assert self._arguments is not None
        self.incomplete_call |= not self._arguments.done
        self._arguments = None
        return [Delta("call_end", "")]
