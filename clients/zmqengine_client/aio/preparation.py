"""Tokenisation of prompts in threads, off the event loop."""

from __future__ import annotations

import asyncio
import functools
import logging

from zmqengine.errors import WorkerLost, ZmqEngineError
from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.model_tokenizer import AsyncModelTokenizer
from zmqengine_client.core.request import Request
from zmqengine_client.images.threads import IMAGE_THREADS
from zmqengine_client.text.prompts import Encode, set_text_prompt
from zmqengine_client.text.text_reader import TextReader

log = logging.getLogger("zmqengine.client")


class AsyncPreparation:
    """One task for each prompt that is being tokenised. An error ends its request."""

    def __init__(self, tokenizer: AsyncModelTokenizer, driver: LoopDriver) -> None:
        self._tokenizer = tokenizer
        self._driver = driver
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, reader: TextReader, encode: Encode) -> None:
        """Tokenise the prompt in a thread, then start the request."""
        self._driver.open()
        task = asyncio.ensure_future(self._prepare(request, reader, encode))
        # The loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End requests that were not started: the client is being closed."""
        for task in self._tasks:
            task.cancel()

    async def _prepare(self, request: Request, reader: TextReader, encode: Encode) -> None:
        try:
            tokenizer = await self._tokenizer.get()
            if encode.images:
                limits = await self._tokenizer.limits()
                work = functools.partial(set_text_prompt, request, reader, tokenizer, encode, limits)
                await asyncio.wrap_future(IMAGE_THREADS.submit(work))
            else:
                await asyncio.to_thread(set_text_prompt, request, reader, tokenizer, encode)
            if not request.ended:
                self._driver.start(request)
        except ZmqEngineError as error:
            request.refuse(error)
        except asyncio.CancelledError:
            request.refuse(WorkerLost("the client was closed"))
            raise
        except BaseException as error:
            # A panic of a Rust extension is no Exception; its reader must not wait for ever either.
            log.exception("request %s: the prompt cannot be prepared", request.id)
            request.refuse(ZmqEngineError(f"the prompt cannot be prepared: {error}"))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        finally:
            if request.listener is not None:
                request.listener.notify()
