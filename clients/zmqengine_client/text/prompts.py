"""Text or messages of a caller to the prompt of a request: the steps that both halves share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from zmqengine.errors import BadRequest, ZmqEngineError
from zmqengine_client.core.options import token_ids
from zmqengine_client.core.request import Request
from zmqengine_client.text.stop_strings import stop_list
from zmqengine_client.text.text_reader import TextReader
from zmqengine_client.text.tokenizer import Tokenizer

log = logging.getLogger("zmqengine.client")

SLOW_S = 1.0

Encode = Callable[[Tokenizer], list[int]]


def new_text_reader(request: Request, stop: str | Sequence[str]) -> TextReader:
    """A text reader with these stop strings; invalid ones end the request."""
    try:
        return TextReader(request, stop_list(stop))
    except ZmqEngineError as error:
        request.refuse(error)
        return TextReader(request, ())


def prompt_encoder(prompt: str | Sequence[int]) -> Encode:
    """The function that tokenises the prompt of `generate`."""
    if isinstance(prompt, str):
        return lambda tokenizer: tokenizer.encode(prompt)
    return lambda tokenizer: token_ids(prompt)


def chat_encoder(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Encode:
    """The function that tokenises the messages of `chat`."""
    return lambda tokenizer: tokenizer.encode_chat(messages, tools, **(chat_template_kwargs or {}))


def set_text_prompt(request: Request, reader: TextReader, tokenizer: Tokenizer, encode: Encode) -> None:
    """Tokenise the prompt of a request. Slow for a long prompt: never on an event loop."""
    started = time.monotonic()
    try:
        ids = encode(tokenizer)
        if not ids:
            raise BadRequest("the prompt is empty")
        prediction = request.options.prediction
        if isinstance(prediction, str):
            prediction = tokenizer.encode(prediction, add_special_tokens=False)
            request.options = msgspec.structs.replace(request.options, prediction=prediction)
    except ZmqEngineError as error:
        request.refuse(error)
        return
    seconds = time.monotonic() - started
    if seconds >= SLOW_S:
        log.warning("request %s: tokenising %d tokens took %.1f s", request.id, len(ids), seconds)
    request.prompt = ids
    reader.start(tokenizer)
