"""Encodes a choice as events of OpenAI's Responses API, or as one response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from zmqengine_http.answers.answer_events import (
    CallArguments,
    CallStarted,
    ChoiceLogprobs,
    Finish,
    Start,
    Text,
    Usage,
    WholeChoice,
)
from zmqengine_http.apis.responses.items import CallItem, MessageItem, OutputItem, ReasoningItem
from zmqengine_http.apis.responses.tools import ToolBook
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange

_encode = msgspec.json.encode


class ReasoningShape(msgspec.Struct, frozen=True):
    """The form of reasoning: a `summary` or content; `packed` adds `encrypted_content`."""

    summary: bool = False
    packed: bool = False


class ResponsesWriter:
    """An `AnswerWriter` for the one choice of a Responses request.

    `head` holds the request's parameters that a response echoes. Each item is closed before the next one
    opens, and passed to `keep`; the finished response is passed to `store`.
    """

    def __init__(
        self,
        id_: str,
        head: dict[str, object],
        book: ToolBook,
        shape: ReasoningShape,
        keep: Callable[[dict[str, object]], None] = lambda document: None,
        store: Callable[[dict[str, object]], None] = lambda document: None,
    ) -> None:
        self._keep = keep
        self._store = store
        self._response = {"id": id_, "object": "response", "created_at": int(time.time()), **head}
        self._book = book
        self._shape = shape
        self._started = False
        self._number = 0
        self._item: OutputItem | None = None
        self._output: list[dict[str, object]] = []
        self._delta_start = b""
        self._finish = Finish("stop")

    def opening(self, index: int, start: Start) -> bytes:
        return b"" if self._started else self._start()

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes:
        opened = b""
        kind = "message" if text.kind == "content" else "reasoning"
        if self._item is None or self._item.kind != kind:
            item: MessageItem | ReasoningItem = (
                MessageItem()
                if kind == "message"
                else ReasoningItem(summary=self._shape.summary, packed=self._shape.packed)
            )
            opened = self._open(item) + self._open_part(item)
        assert self._item is not None
        self._item.texts.append(text.text)
        return opened + self._delta(text.text)

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes:
        item = CallItem(call.id, self._book.find(call.name))
        opened = self._open(item)
        if not item.custom:
            self._set_delta("response.function_call_arguments.delta", {})
        return opened

    def call_arguments(self, index: int, piece: CallArguments) -> bytes:
        assert isinstance(self._item, CallItem)
        self._item.texts.append(piece.text)
        # The input of a freeform tool is a string inside the model's JSON, known only when that is
        # complete.
        return b"" if self._item.custom else self._delta(piece.text)

    def call_ended(self, index: int, place: int) -> bytes:
        return self._close("completed")

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes:
        self._finish = finish
        return self._close("incomplete" if finish.reason == "length" else "completed")

    def done(self, usage: Usage) -> bytes:
        status, details = _outcome(self._finish)
        response = self._document(
            status, output=self._output, incomplete_details=details, usage=_usage(usage)
        )
        self._store(response)
        return self._event(f"response.{status}", response=response)

    def error(self, error: ApiError) -> bytes:
        started = b"" if self._started else self._start()
        response = self._document("failed", output=self._output, error=failure(error))
        return started + self._event("response.failed", response=response)

    def keepalive(self) -> bytes:
        """An event instead of a comment: Codex's idle timeout ignores comments."""
        if not self._started:
            return self._start()
        return self._event("response.in_progress", response=self._document("in_progress"))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        items: list[OutputItem] = []
        if choice.reasoning:
            items.append(ReasoningItem(summary=self._shape.summary, packed=self._shape.packed))
            items[-1].texts.append(choice.reasoning)
        if choice.content:
            items.append(MessageItem())
            items[-1].texts.append(choice.content)
        for call in choice.calls:
            items.append(CallItem(call.id, self._book.find(call.name)))
            items[-1].texts.append(call.arguments)
        status, details = _outcome(choice.finish)
        documents = [item.document("completed") for item in items]
        if documents and status == "incomplete":
            documents[-1]["status"] = status
        for document in documents:
            self._keep(document)
        response = self._document(status, output=documents, incomplete_details=details, usage=_usage(usage))
        self._store(response)
        return _encode(response)

    def _start(self) -> bytes:
        self._started = True
        response = self._document("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _document(self, status: str, **fields: object) -> dict[str, object]:
        absent: dict[str, object] = {"output": [], "error": None, "incomplete_details": None, "usage": None}
        return {**self._response, "status": status, **absent, **fields}

    def _open(self, item: OutputItem) -> bytes:
        closed = self._close("completed")
        self._item = item
        return closed + self._event(
            "response.output_item.added", output_index=len(self._output), item=item.document("in_progress")
        )

    def _open_part(self, item: MessageItem | ReasoningItem) -> bytes:
        if isinstance(item, MessageItem):
            self._set_delta("response.output_text.delta", {"content_index": 0, "logprobs": []})
        elif item.summary:
            self._set_delta("response.reasoning_summary_text.delta", {"summary_index": 0})
            return self._part_event("response.reasoning_summary_part.added", "summary_index", item.part())
        else:
            self._set_delta("response.reasoning_text.delta", {"content_index": 0})
        return self._part_event("response.content_part.added", "content_index", item.part())

    def _close(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        ended = self._end_call(item) if isinstance(item, CallItem) else self._end_text(item)
        document = item.document(status)
        ended += self._event("response.output_item.done", output_index=len(self._output), item=document)
        self._output.append(document)
        self._keep(document)
        self._item = None
        return ended

    def _end_text(self, item: MessageItem | ReasoningItem) -> bytes:
        text = "".join(item.texts)
        if isinstance(item, MessageItem):
            done = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
            return done + self._part_event("response.content_part.done", "content_index", item.part())
        if item.summary:
            done = self._of_item("response.reasoning_summary_text.done", summary_index=0, text=text)
            return done + self._part_event(
                "response.reasoning_summary_part.done", "summary_index", item.part()
            )
        done = self._of_item("response.reasoning_text.done", content_index=0, text=text)
        return done + self._part_event("response.content_part.done", "content_index", item.part())

    def _end_call(self, item: CallItem) -> bytes:
        text = item.text
        if item.custom:
            return self._of_item("response.custom_tool_call_input.delta", delta=text) + self._of_item(
                "response.custom_tool_call_input.done", input=text
            )
        name = item.document("completed")["name"]
        return self._of_item("response.function_call_arguments.done", name=name, arguments=text)

    def _part_event(self, name: str, index: str, part: dict[str, object]) -> bytes:
        return self._of_item(name, **{index: 0}, part=part)

    def _of_item(self, event: str, /, **fields: object) -> bytes:
        assert self._item is not None
        return self._event(event, item_id=self._item.id, output_index=len(self._output), **fields)

    def _set_delta(self, name: str, fields: dict[str, object]) -> None:
        """Encode the constant part of the open item's deltas."""
        assert self._item is not None
        head = {"type": name, "item_id": self._item.id, "output_index": len(self._output), **fields}
        self._delta_start = f"event: {name}\ndata: ".encode() + _encode(head)[:-1] + b',"delta":'

    def _delta(self, text: str) -> bytes:
        number = self._number
        self._number += 1
        return self._delta_start + _encode(text) + f',"sequence_number":{number}}}\n\n'.encode()

    def _event(self, event: str, /, **fields: object) -> bytes:
        document = {"type": event, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {event}\ndata: ".encode() + _encode(document) + b"\n\n"


def _outcome(finish: Finish) -> tuple[str, dict[str, object] | None]:
    if finish.reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    return "completed", None


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, **usage.kept_document},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


_CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded", 529: "server_is_overloaded"}


def failure(error: ApiError) -> dict[str, object]:
    """The `error` of a failed response, with the codes and the retry message that Codex parses."""
    code = error.code if error.code == "context_length_exceeded" else _CODES.get(error.status)
    if code is None:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
    message = error.message
    if error.retry_after_ms is not None:
        message = f"{message.rstrip('.')}. Please try again in {error.retry_after_ms / 1000:g}s."
    return {"code": code, "message": message}


def tells_by_event(exchange: Exchange, error: ApiError) -> bool:
    """Whether to send a refusal of a stream as a `response.failed` event instead of an HTTP status.

    Codex, which sends the header `originator`, acts on the codes of a failed response: it compacts its
    conversation, or waits and retries. It only shows the text of a 400, and does not retry a 429. Other
    clients expect the status.
    """
    known = error.code == "context_length_exceeded" or error.status in _CODES
    return known and exchange.header(b"originator") is not None
