"""Tokenisation of prompts on the calling thread, which gets errors at once."""

from __future__ import annotations

from zmqengine.errors import ZmqEngineError
from zmqengine_client.core.request import Request
from zmqengine_client.images.threads import IMAGE_THREADS
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.model_tokenizer import ModelTokenizer
from zmqengine_client.text.prompts import Encode, set_text_prompt
from zmqengine_client.text.text_reader import TextReader


class Preparation:
    """Rejected prompts end their request; other errors are raised to the caller."""

    def __init__(self, tokenizer: ModelTokenizer, driver: IoThread) -> None:
        self._tokenizer = tokenizer
        self._driver = driver

    def begin(self, request: Request, reader: TextReader, encode: Encode) -> None:
        """Set the prompt and start the request."""
        try:
            tokenizer = self._tokenizer.get()
            if encode.images:
                limits = self._tokenizer.limits()
                # Their threads bound the memory of decoded images, however many threads call.
                IMAGE_THREADS.submit(
                    lambda: set_text_prompt(request, reader, tokenizer, encode, limits)
                ).result()
            else:
                set_text_prompt(request, reader, tokenizer, encode)
        except ZmqEngineError as error:
            request.refuse(error)
        if not request.ended:
            self._driver.start(request)

    def cancel(self) -> None:
        """Do nothing: `begin` returns only when it is done."""
