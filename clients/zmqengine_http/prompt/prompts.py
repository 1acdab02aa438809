"""Texts and rendered chats to token ids, on threads, so that the event loop never waits for a tokenizer.

Texts of small requests are the exception: handing them to a thread costs more, about 0.3 ms, than tokenizing
them. They are tokenized on the event loop, in one batch with those of other requests that came at the same
time.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from zmqengine_client.errors import ZmqEngineError
from zmqengine_client.images.prompt_image import PromptImage
from zmqengine_client.images.prompts import place_images
from zmqengine_client.images.threads import IMAGE_THREADS
from zmqengine_client.text.long_texts import count_up_to
from zmqengine_client.text.reasoning import TAIL_TOKENS
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.prompt.open_turn import OpenTurn, open_turn
from zmqengine_http.prompt.pictures import Picture, features_of, prepared
from zmqengine_http.prompt.template import render_chat
from zmqengine_http.serving import logs
from zmqengine_http.serving.errors import ApiError, ContextTooLong, bad_field
from zmqengine_http.workers.worker import Model

SLOW_S = 1.0
SMALL_BYTES = 2048
"""Body size up to which tokenizing takes no longer than a thread hand-over."""
DENSE_BYTES = 8
"""Bytes per token that text rarely exceeds; a text that would have more of them per context token is counted
first."""
GATHER_S = 0.005
"""Longest wait of a text while each turn of the event loop brings another one. A text alone waits one
turn."""
T = TypeVar("T")


class Prompt(msgspec.Struct, frozen=True):
    """Token ids of a prompt; `reasoning_open` if it ends within the reasoning.

    `prefill`: text at its end that the output continues, to be read by a splitter first.
    """

    tokens: list[int]
    reasoning_open: bool = False
    prefill: str = ""
    images: Sequence[PromptImage] = ()


def is_short(size: int) -> bool:
    """Whether the contents of a body of `size` bytes are tokenized on the event loop."""
    return size <= SMALL_BYTES


class Tokenizing:
    """A thread pool for templates and tokenizers. Work of over a second is logged with the request's id.

    `size` is the length in bytes of the request body that holds the text.
    """

    def __init__(self, threads: int) -> None:
        self._batches = TextBatches()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Cancel queued work; running work ends in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, request_id: str, size: int, work: Callable[[], T], count: Callable[[T], int] | None = None
    ) -> T:
        """The result of `work`, run on a thread unless the request is short.

        `count` gives the tokens of a result, for the log; None for work on a request that makes none.
        """
        if is_short(size):
            return work()
        started = time.monotonic()
        result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        seconds = time.monotonic() - started
        if seconds > SLOW_S:
            facts = {} if count is None else {"tokens": count(result)}
            what = "slow request" if count is None else "slow tokenizing"
            logs.warning(what, id=request_id, seconds=round(seconds, 3), **facts)
        return result

    async def images(self, request_id: str, model: Model, pictures: Sequence[Picture]) -> list[Picture]:
        """The images, ready for a prompt. Raises a 400 that names the field of one that is none, and for more than the
        context holds: each of its tokens is kilobytes of pixels until it is sent.

        They are prepared one at a time, so that requests with images take turns in the few threads of images, and one
        whose client has left ends after an image.
        """
        started = time.monotonic()
        ready: list[Picture] = []
        features = 0
        for each in pictures:
            ready.append(await self.image_work(functools.partial(prepared, each, model)))
            features += features_of(ready[-1], model)
            if features >= model.context_tokens:
                raise ContextTooLong("messages", prompt=features + 1, wanted=1, context=model.context_tokens)
        seconds = time.monotonic() - started
        if seconds > SLOW_S:
            logs.warning("slow images", id=request_id, seconds=round(seconds, 3), images=len(ready))
        return ready

    async def image_work(self, work: Callable[[], T]) -> T:
        """The result of `work` on images or on a prompt that has some, in their own few threads."""
        return await asyncio.wrap_future(IMAGE_THREADS.submit(work))

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
        """The token ids of a predicted output."""
        return await self.run(request_id, size, lambda: encode_prediction(model, text), len)

    async def short_chat(
        self,
        model: Model,
        messages: Sequence[dict[str, object]],
        tools: Sequence[dict[str, object]],
        variables: Mapping[str, object],
        continues: bool = False,
    ) -> Prompt:
        """The prompt of a chat that `is_short`. Raises a 400 if the model's template rejects it."""
        text, prefill, _ = _chat_text(model, messages, tools, variables, (), continues=continues)
        try:
            # The template writes the special tokens itself.
            (tokens,) = await self._batches.encode(model.tokenizer, [text], add_special_tokens=False)
        except ZmqEngineError as error:
            raise _refused_messages(error) from None
        return _chat_prompt(model, tokens, prefill)


def encode_text(model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text. Raises a 400 if it is not Unicode, or certainly longer than the context."""
    check_text_fits("prompt", model, text)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def encode_prediction(model: Model, text: str) -> list[int]:
    """The token ids of a predicted output. Raises a 400 if it is certainly longer than the context."""
    check_text_fits("prediction", model, text)
    return model.tokenizer.encode(text, add_special_tokens=False)


def encode_chat(
    model: Model,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    variables: Mapping[str, object],
    continues: bool = False,
    pictures: Sequence[Picture] = (),
) -> Prompt:
    """The prompt of a chat; with `continues` the last message, the assistant's, is left open.

    Raises a 400 with the template's reason if it rejects the messages.
    """
    text, prefill, found = _chat_text(model, messages, tools, variables, pictures, continues=continues)
    images: Sequence[PromptImage] = ()
    try:
        # The template writes the special tokens itself.
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        if found:
            ready = [picture.ready for picture in found if picture.ready is not None]
            tokens, images = place_images(tokens, ready, model.tokenizer.vision_card)
    except ZmqEngineError as error:
        raise _refused_messages(error) from None
    return msgspec.structs.replace(_chat_prompt(model, tokens, prefill), images=images)


def _chat_text(
    model: Model,
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]],
    variables: Mapping[str, object],
    pictures: Sequence[Picture],
    *,
    continues: bool,
) -> tuple[str, OpenTurn | None, list[Picture]]:
    """The text of a chat, its prefill if it `continues`, and its images."""
    prefill = None
    try:
        text, found = render_chat(model, messages[:-1] if continues else messages, tools, variables, pictures)
        if continues:
            if len(found) < len(pictures):
                raise bad_field(
                    "messages", "the assistant's last message is continued as text: no image can be in it"
                )
            prefill = open_turn(model, messages[-1], reasoning_open=model.markers.opens_reasoning(text))
            text += prefill.text
        check_text_fits("messages", model, text)
    except ZmqEngineError as error:
        raise _refused_messages(error) from None
    return text, prefill, found


def _refused_messages(error: ZmqEngineError) -> ApiError:
    return bad_field("messages", error.message[:500])


def _chat_prompt(model: Model, tokens: list[int], prefill: OpenTurn | None) -> Prompt:
    if prefill is not None:
        return Prompt(tokens, prefill.reasoning_open, prefill.read)
    if not model.markers.think_start:
        return Prompt(tokens)
    tail = model.tokenizer.decode(tokens[-TAIL_TOKENS:], skip_special_tokens=False)
    return Prompt(tokens, reasoning_open=model.markers.opens_reasoning(tail))


def check_text_fits(param: str, model: Model, text: str) -> None:
    """Raise a 400 for a text that certainly has more tokens than the context.

    The cost is bounded by the context, while tokenizing 1 MB takes a second and more. A text that passes may
    still be too long.
    """
    context = model.context_tokens
    if len(text) <= context:
        return
    size = len(text.encode("utf-8", "replace"))
    at_least = math.ceil(size / model.tokenizer.longest_token_bytes)
    if at_least <= context and size > context * DENSE_BYTES:
        at_least = count_up_to(model.tokenizer, text, context)[0]
    if at_least > context:
        raise ContextTooLong(param, prompt=at_least, wanted=1, context=context)


class _Waiting(NamedTuple):
    """The texts of one request, and the future of their token ids."""

    texts: Sequence[str]
    encoded: asyncio.Future[list[list[int]]]


class TextBatches:
    """Tokenizes the short texts of concurrent requests in one call, which blocks the event loop.

    The tokenizer spreads the texts of a call over the machine's cores, so that sixty requests that come at
    once wait for one call instead of for each other. They also reach the worker together, which prefills
    their prompts in one step instead of making the later ones wait for the first.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[Tokenizer, bool], list[_Waiting]] = {}

    async def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The token ids of each text. Raises the tokenizer's error for these texts (not Unicode:
        `BadRequest`)."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # Runs after all tasks that are ready now, any of which may add its texts.
            loop.call_soon(self._gather, 0, loop.time() + GATHER_S)
        waiting = _Waiting(texts, loop.create_future())
        self._waiting.setdefault((tokenizer, add_special_tokens), []).append(waiting)
        return await waiting.encoded

    def _gather(self, before: int, until_s: float) -> None:
        """Tokenize, unless texts were added since the last turn of the loop: then more may follow."""
        loop = asyncio.get_running_loop()
        count = sum(map(len, self._waiting.values()))
        if count > before and loop.time() < until_s:
            loop.call_soon(self._gather, count, until_s)
        else:
            self._encode_waiting()

    def _encode_waiting(self) -> None:
        batches, self._waiting = self._waiting, {}
        for (tokenizer, special), batch in batches.items():
            try:
                encoded = iter(tokenizer.encode_all([text for each in batch for text in each.texts], special))
            except BaseException:  # noqa: BLE001 - panics of the library too: each request gets its own error
                for each in batch:
                    _encode_alone(tokenizer, special, each)
                continue
            for each in batch:
                ids = [next(encoded) for _ in each.texts]
                if not each.encoded.done():
                    each.encoded.set_result(ids)


def _encode_alone(tokenizer: Tokenizer, special: bool, waiting: _Waiting) -> None:
    if waiting.encoded.done():
        return
    try:
        waiting.encoded.set_result(tokenizer.encode_all(waiting.texts, special))
    except BaseException as error:  # noqa: BLE001 - panics of the library too: no request waits for ever
        waiting.encoded.set_exception(error)
