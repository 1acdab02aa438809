"""Text or messages of a caller to the prompt of a request: the steps that both halves share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from zmqengine.errors import BadRequest, ZmqEngineError
from zmqengine.protocol.messages import Limits
from zmqengine_client.core.options import token_ids
from zmqengine_client.core.request import Request
from zmqengine_client.images.prompts import (
    place_images,
    ready_images,
    with_markers,
)
from zmqengine_client.images.sources import ImageLike, file_bytes
from zmqengine_client.text.answer_text import chat_splitter
from zmqengine_client.text.chats.messages import take_messages
from zmqengine_client.text.chats.rendering import render_chat, reserved_name, takes_tools
from zmqengine_client.text.reasoning import thinking_max
from zmqengine_client.text.stop_strings import stop_list
from zmqengine_client.text.text_reader import TextReader
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import TextSplitter

log = logging.getLogger("zmqengine.client")

SLOW_S = 1.0


class Encoded(NamedTuple):
    """Token ids of a prompt with placeholders of images, and these in order."""

    ids: list[int]
    images: Sequence[ImageLike] = ()


class Encode(NamedTuple):
    """The way from a prompt to token ids, the images in it, and the splitter of the answer to these ids.

    `calls`: the answer may call tools.
    """

    prompt: Callable[[Tokenizer], Encoded]
    images: Sequence[ImageLike] = ()
    splitter: Callable[[Tokenizer, Sequence[int]], TextSplitter | None] = lambda tokenizer, ids: None
    calls: bool = False


def new_text_reader(request: Request, stop: str | Sequence[str]) -> TextReader:
    """A text reader with these stop strings; invalid ones end the request."""
    try:
        return TextReader(request, stop_list(stop))
    except ZmqEngineError as error:
        request.refuse(error)
        return TextReader(request, ())


def prompt_encoder(prompt: str | Sequence[int], images: Sequence[ImageLike] = ()) -> Encode:
    """The encoder of the prompt of `generate`. Images come first, unless the prompt has a place for each."""

    def encoded(tokenizer: Tokenizer) -> Encoded:
        if not isinstance(prompt, str):
            ids = token_ids(prompt)
        elif images:
            ids = tokenizer.encode(with_markers(prompt, tokenizer.image_marker, len(images)))
        else:
            ids = tokenizer.encode(prompt)
        return Encoded(ids, images)

    return Encode(encoded, images)


def chat_encoder(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Encode:
    """The encoder of the prompt of `chat`, and the splitter of its answer."""
    try:
        taken = take_messages(messages)
        schemas = _schemas(tools or ())
        if (name := reserved_name(chat_template_kwargs or ())) is not None:
            raise BadRequest(f"chat_template_kwargs: {name[:40]!r} cannot be set")
    except BadRequest as error:
        refusal = error

        def refuse(tokenizer: Tokenizer) -> Encoded:
            raise refusal

        return Encode(refuse)

    def encoded(tokenizer: Tokenizer) -> Encoded:
        if not tokenizer.template_for(tools=bool(tools)):
            raise BadRequest("the model has no chat template: use generate() with a prompt")
        if tools and not takes_tools(tokenizer):
            raise BadRequest("tools: this model's chat template takes none")
        rendered = render_chat(
            tokenizer, taken.messages, tools or (), chat_template_kwargs or {}, images=bool(taken.images)
        )
        # The template writes the special tokens itself.
        ids = tokenizer.encode(rendered.text, add_special_tokens=False)
        return Encoded(ids, [taken.images[number] for number in rendered.images])

    def splitter(tokenizer: Tokenizer, ids: Sequence[int]) -> TextSplitter | None:
        return chat_splitter(tokenizer, ids, schemas)

    return Encode(encoded, taken.images, splitter, calls=bool(schemas))


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, object]]:
    """The parameters of functions by name. Raises `BadRequest` for a tool that is none of OpenAI's form."""
    schemas: dict[str, Mapping[str, object]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
            raise BadRequest(f"tools[{index}]: a function is {form}")
        schemas[name] = function.get("parameters") or {}
    return schemas


def set_text_prompt(
    request: Request, reader: TextReader, tokenizer: Tokenizer, encode: Encode, limits: Limits | None = None
) -> None:
    """Tokenise the prompt of a request, and prepare its images by the worker's `limits`.

    Slow for a long prompt and for images: never on an event loop.
    """
    started = time.monotonic()
    try:
        ids, images = encode.prompt(tokenizer)
        if images:
            assert limits is not None
            files = [file_bytes(image) for image in images]
            card = tokenizer.vision_card
            ids, request.images = place_images(ids, ready_images(files, card, limits), card)
        if not ids:
            raise BadRequest("the prompt is empty")
        prediction = request.options.prediction
        if isinstance(prediction, str):
            prediction = tokenizer.encode(prediction, add_special_tokens=False)
            request.options = msgspec.structs.replace(request.options, prediction=prediction)
        if isinstance(request.options.thinking_max, int):
            bound = thinking_max(tokenizer, request.options.thinking_max, ids, calls=encode.calls)
            if bound is None:
                raise BadRequest("thinking_max: the model has no markers of reasoning that are known")
            request.options = msgspec.structs.replace(request.options, thinking_max=bound)
    except ZmqEngineError as error:
        request.refuse(error)
        return
    seconds = time.monotonic() - started
    if seconds >= SLOW_S:
        log.warning("request %s: tokenising %d tokens took %.1f s", request.id, len(ids), seconds)
    request.prompt = ids
    # A constraint holds for the output from its first token on: there is nothing beside it.
    reader.start(tokenizer, encode.splitter(tokenizer, ids) if request.options.constraint is None else None)
