"""A conversation: its messages, the options of its answers, and the model that gives them."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import msgspec

from zmqengine.cli.answer import write_answer
from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget
from zmqengine.cli.markdown import answer_writer
from zmqengine.errors import BadRequest, ZmqEngineError
from zmqengine_client import Client
from zmqengine_client.core.options import Options, check_names, check_options, make_options
from zmqengine_client.images.sources import file_bytes


class Conversation:
    """The messages of a conversation, and the request for the next one. Use it as a context manager.

    `options` are those of the client's `chat`. `model` is the name of the model that answers.
    """

    def __init__(self, target: WorkerTarget, system: str | None, options: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.options = options
        self.model = ""
        self._target = target
        self._system = system
        self._images: list[str] = []
        self._connected = contextlib.ExitStack()
        self._client: Client | None = None
        self.reset()

    def __enter__(self) -> Conversation:
        self._connect(self._target)
        return self

    def __exit__(self, *error: Any) -> None:
        self._connected.__exit__(*error)

    def use(self, model: str) -> None:
        """Have another model of `zmqengine serve` answer. Raises what refuses it; the earlier one answers on then."""
        earlier = self._target
        self._connected.close()
        try:
            self._connect(dataclasses.replace(earlier, model=model, address=None))
        except ZmqEngineError:
            self._connect(earlier)
            raise

    def _connect(self, target: WorkerTarget) -> None:
        self._client = self._connected.enter_context(ready_client(target, name="chat"))
        card = self._client.describe().model
        self.model = card.name if card is not None else ""
        self._target = target

    # --- messages ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all messages but the instructions."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._images = []

    def instruct(self, system: str | None) -> None:
        """Replace the instructions at the head of the conversation; None for none."""
        self._system = system
        said = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([] if system is None else [{"role": "system", "content": system}]) + said

    def resume(self, messages: list[dict[str, Any]]) -> None:
        """Go on with these messages."""
        self.messages = list(messages)
        self._images = []
        first = messages[:1]
        self._system = str(first[0]["content"]) if first and first[0]["role"] == "system" else None

    def show(self, path: str) -> None:
        """Show an image with the next question. Raises `BadRequest` for a file that cannot be read."""
        # Read once: the file may change while the conversation goes on.
        data = base64.b64encode(file_bytes(Path(path).expanduser())).decode()
        self._images.append(f"data:image/*;base64,{data}")

    def drop_images(self) -> bool:
        """Drop the images of the next question; returns whether there were any."""
        dropped, self._images = bool(self._images), []
        return dropped

    @property
    def last_answer(self) -> str:
        """The text of the last answer; empty before the first."""
        last = self.messages[-1] if self.messages else {}
        return str(last["content"]) if last.get("role") == "assistant" else ""

    def say(self, text: str) -> str:
        """Write the model's answer to `text`; returns its timing. An interrupted answer is kept.

        If the request fails the conversation is unchanged.
        """
        shown = [{"type": "image", "image": image} for image in self._images]
        question = {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}
        summary = self._answer([*self.messages, question])
        self._images = []
        return summary

    def retry(self) -> str:
        """Write another answer to the last question. Raises `BadRequest` before the first one."""
        if not self.last_answer:
            raise BadRequest("there is no answer to repeat yet")
        return self._answer(self.messages[:-1])

    def _answer(self, messages: list[dict[str, Any]]) -> str:
        assert self._client is not None
        with answer_writer() as writer:
            answer = write_answer(self._client.chat(messages, **self.options), writer)
        click.echo(" [stopped]" if answer.interrupted else "")
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer.summary

    # --- options -------------------------------------------------------------------------------------------

    def set(self, name: str, value: str) -> None:
        """Set an option of answers, written as JSON or as a bare text; an empty value is its default again.

        Raises `BadRequest` for an unknown name or a value out of bounds.
        """
        name = name.replace("-", "_")
        options = {key: kept for key, kept in self.options.items() if key != name}
        if value:
            try:
                options[name] = msgspec.json.decode(value)
            except msgspec.DecodeError:
                options[name] = value
        try:
            check_names({name: value}, Options)
            check_options(make_options({key: options[key] for key in options if key != "stop"}))  # type: ignore[arg-type]
        except TypeError as error:
            raise BadRequest(str(error)) from None
        self.options = options

    def shown_options(self) -> list[str]:
        """The options that were set, a line each."""
        return [f"{name} {json.dumps(value)}" for name, value in self.options.items() if value is not None]
