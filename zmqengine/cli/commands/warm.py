"""`zmqengine warm`: prefill of a prompt that then stays in the prefix cache."""

from __future__ import annotations

from typing import Any, TextIO

import click
import msgspec

from zmqengine.cli.connection import ready_client
from zmqengine.cli.flags import WorkerTarget, model_option, worker_options


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    """The start of a conversation, as front-ends send it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@click.command()
@click.argument("file", type=click.File("r", encoding="utf-8"))
@worker_options
@model_option
def warm(file: TextIO, target: WorkerTarget) -> int:
    """Prefill the prompt in FILE and pin it in the prefix cache.

    FILE is JSON, {"messages": [...], "tools": [...]} as a front-end sends them, or else plain text. Later
    prompts reuse the prefix they share with it. At most half of the prefix cache can be pinned.
    """
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"FILE is not UTF-8: {error}") from None
    with ready_client(target, name="warm") as client:
        limits = client.describe().limits
        if limits is not None and limits.cache_scope == "session":
            raise click.ClickException(
                "this worker keeps the prompts of each session to itself (--cache-scope session): "
                "nobody else could use this one"
            )
        conversation = _conversation(text)
        if conversation is None:
            stream = client.generate(text, max_tokens=1, pin=True)
        else:
            stream = client.chat(conversation.messages, tools=conversation.tools, max_tokens=1, pin=True)
        stream.text()
        completion = stream.result
    assert completion is not None, "the stream has ended"
    new = completion.prompt_tokens - completion.cached_tokens
    click.echo(f"{completion.prompt_tokens} tokens are kept, {new} of them new", err=True)
    return 0


def _conversation(text: str) -> _Conversation | None:
    """The conversation in a JSON text; None for plain text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return msgspec.json.decode(text.encode(), type=_Conversation)
    except msgspec.DecodeError as error:
        raise click.UsageError(f"FILE is no conversation: {error}") from None
