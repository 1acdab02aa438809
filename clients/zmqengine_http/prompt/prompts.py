"""From the texts of a request to token ids, on threads, so that the event loop never waits for a tokenizer.

Only a text so short that the hand-over would cost more, some 0.3 ms, is done at once, together with those that came
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from zmqengine_client.errors import BadRequest, ZmqEngineError
from zmqengine_http.prompt.template_messages import (
    Messages,
    fitted,
    one_by_one,
    takes_tools,
    tool_variables,
    with_merged_neighbours,
    with_system_in_user,
    with_written_arguments,
)
from zmqengine_http.prompt.text_batches import TextBatches
from zmqengine_http.prompt.text_length import check_text_fits
from zmqengine_http.serving import logs
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.workers.worker import Model

SLOW_S = 1.0
SMALL_BYTES = 2048
"""What a body of this length holds is tokenised in about the time that handing it to a thread and back takes."""
TAIL_TOKENS = 32
RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""What a request has fields of its own for, or has no say in."""
T = TypeVar("T")


class Conversation(msgspec.Struct, frozen=True):
    """A chat as templates read it, in no API's words.

    Messages have a `role` and text `content`; the arguments of `tool_calls` are objects where they can be. `tools` are
    `{"type": "function", "function": {...}}`. `variables` are further ones for the template.
    """

    messages: Sequence[dict[str, object]]
    tools: Sequence[dict[str, object]] = ()
    variables: dict[str, object] = {}


class Prompt(msgspec.Struct, frozen=True):
    """Token ids, and whether a chat's template ended with the marker that starts reasoning."""

    tokens: list[int]
    reasoning_open: bool = False


def is_short(size: int) -> bool:
    """Whether what a body of this length holds is tokenised on the event loop."""
    return size <= SMALL_BYTES


class Tokenizing:
    """A pool of threads for templates and tokenizers. What takes over a second is logged with the request's id.

    `size` is the length of the body that the text came in.
    """

    def __init__(self, threads: int) -> None:
        self._batches = TextBatches()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Let running work end in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, request_id: str, size: int, work: Callable[[], T], count: Callable[[T], int]) -> T:
        """The result of `work`, done on a thread unless it is small."""
        if is_short(size):
            return work()
        started = time.monotonic()
        result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        seconds = time.monotonic() - started
        if seconds > SLOW_S:
            logs.warning("slow tokenizing", id=request_id, tokens=count(result), seconds=round(seconds, 3))
        return result

    async def texts(self, request_id: str, size: int, model: Model, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        if not is_short(size):
            return await self.run(
                request_id,
                size,
                lambda: [encode_text(model, text) for text in texts],
                lambda encoded: sum(map(len, encoded)),
            )
        for text in texts:
            check_text_fits("prompt", model, text)
        return await self._batches.encode(model.tokenizer, texts, add_special_tokens=True)

    async def prediction(self, request_id: str, size: int, model: Model, text: str) -> list[int]:
        """The token ids of what an answer may be like."""
        return await self.run(request_id, size, lambda: encode_prediction(model, text), len)

    async def short_chat(self, model: Model, conversation: Conversation) -> Prompt:
        """The prompt of a chat that `is_short`. Raises a 400 if the model's template cannot take it."""
        text = _chat_text(model, conversation)
        try:
            # The template writes the special tokens itself.
            (tokens,) = await self._batches.encode(model.tokenizer, [text], add_special_tokens=False)
        except ZmqEngineError as error:
            raise _refused_messages(error) from None
        return _chat_prompt(model, tokens)


def encode_text(model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text. Raises a 400 if it is no Unicode, or surely longer than the context."""
    check_text_fits("prompt", model, text)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def encode_prediction(model: Model, text: str) -> list[int]:
    """The token ids of what an answer may be like. Raises a 400 if it is surely longer than the context."""
    check_text_fits("prediction", model, text)
    return model.tokenizer.encode(text, add_special_tokens=False)


def encode_chat(model: Model, conversation: Conversation) -> Prompt:
    """The prompt of a chat. Raises a 400 that says what the template refused."""
    text = _chat_text(model, conversation)
    try:
        # The template writes the special tokens itself.
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
    except ZmqEngineError as error:
        raise _refused_messages(error) from None
    return _chat_prompt(model, tokens)


def _chat_text(model: Model, conversation: Conversation) -> str:
    tools = conversation.tools
    template = model.tokenizer.template_for(tools=bool(tools))
    if not template:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    for name in conversation.variables:
        if not name.isidentifier() or name in RESERVED:
            raise bad_field("chat_template_kwargs", f"{name[:40]!r} cannot be set")
    try:
        variables = model.tokenizer.variables_of_template(tools=bool(tools))
        if tools and not takes_tools(template, variables):
            raise bad_field("tools", "this model's chat template takes none", code="unsupported_parameter")
        messages = fitted(conversation.messages, tools, template, variables, model.markers)
        text = _rendered(model, messages, {**tool_variables(tools, variables), **conversation.variables})
        check_text_fits("messages", model, text)
    except ZmqEngineError as error:
        raise _refused_messages(error) from None
    return text


def _refused_messages(error: ZmqEngineError) -> ApiError:
    return bad_field("messages", error.message[:500])


def _rendered(model: Model, messages: Messages, options: Mapping[str, object]) -> str:
    render: Callable[..., str] = model.tokenizer.apply_chat_template
    try:
        return render(messages, **options)
    except BadRequest as refusal:
        # Many templates demand that user and assistant alternate, and many clients send two messages of the user; some
        # take one call at a time, put texts together where most take an object, or have no place for a system.
        for change in (with_merged_neighbours, one_by_one, with_written_arguments, with_system_in_user):
            changed = change(messages)
            if changed != messages:
                messages = changed
                with contextlib.suppress(BadRequest):
                    return render(messages, **options)
        raise refusal from None


def _chat_prompt(model: Model, tokens: list[int]) -> Prompt:
    return Prompt(tokens, _reasoning_open(model, tokens))


def _reasoning_open(model: Model, tokens: list[int]) -> bool:
    start, end = model.markers.think_start, model.markers.think_end
    if not start:
        return False
    tail = model.tokenizer.decode(tokens[-TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rfind(start) > tail.rfind(end)
