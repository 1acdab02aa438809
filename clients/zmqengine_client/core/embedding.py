"""Embeds on the client's side: texts split into messages within the worker's limits, and vectors as arrays."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import CacheScope, Embed, End, Limits, ModelCard, VectorKind
from zmqengine.request_rules import Vectors, check_text, check_vectors
from zmqengine_client.core.options import RequestOptions, checked_command
from zmqengine_client.core.request import Request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

IN_FLIGHT = 4
"""Messages of one call in flight: the worker computes one while the next are tokenized and sent."""
TOKEN_BYTES = 5
"""Maximum bytes of a token id in msgpack."""
TEXT_BYTES = 10
MESSAGE_BYTES = 1024
"""Maximum bytes of a message without its texts."""
BATCH = 1
"""The priority of batch work."""
_embed_decoder = msgspec.msgpack.Decoder(Embed)

Progress = Callable[[int, int], None]


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`, `embed_counted`, `rerank` and `rerank_counted`.

    `priority` defaults to batch work; give less than 1 for an interactive query. `truncate` cuts a text that is too
    long for the model, which raises `ContextExceeded` otherwise. `on_progress` is called with the number of embedded
    texts and the number of all. `cache_scope` and `cache_salt` are those of `Options`, where the model is a decoder.
    """

    priority: int
    deadline_ms: int | None
    cache_scope: CacheScope | None
    cache_salt: str
    truncate: bool
    on_progress: Progress | None


class TextIds(NamedTuple):
    """A text as token ids; `second`: index of the first token of a pair's second text, 0 for a single text.

    `is_whole`: False for the beginning of a text that is longer, and too long already.
    """

    ids: list[int]
    second: int = 0
    is_whole: bool = True


class Embedded(NamedTuple):
    """Vectors (texts, floats) of float32, and the number of tokens of all texts."""

    vectors: npt.NDArray[np.float32]
    tokens: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its index, and its score from 0 to 1."""

    index: int
    score: float


def check_list(name: str, texts: object) -> None:
    """Raise `BadRequest` for one text in place of a list of texts: its characters would be read as texts."""
    if isinstance(texts, (str, bytes)):
        raise BadRequest(f"{name}: a list of texts is wanted, not one text")


def messages(
    texts: Sequence[TextIds], limits: Limits, tail: Sequence[int], *, truncate: bool, first: int
) -> Iterator[list[TextIds]]:
    """Texts in as few messages as the worker's limits allow; `first` is the index of the first one, for errors.

    With `truncate` a text that is too long is cut before the special tokens of `tail`.
    """
    part: list[TextIds] = []
    room = limits.frame_bytes_max - MESSAGE_BYTES
    left = room
    for index, text in enumerate(texts, start=first):
        if truncate and len(text.ids) > limits.context_tokens_max:
            kept = limits.context_tokens_max - len(tail)
            if text.second >= kept:
                raise BadRequest(
                    f"text {index}: the first text of the pair leaves no room for the second one"
                )
            text = TextIds([*text.ids[:kept], *tail], text.second)  # noqa: PLW2901
        check_text(text.ids, index, limits.context_tokens_max, is_whole=text.is_whole)
        needs = TEXT_BYTES + TOKEN_BYTES * len(text.ids)
        if part and (len(part) >= limits.texts_max or needs > left):
            yield part
            part, left = [], room
        part.append(text)
        left -= needs
    if part:
        yield part


def embed_of(
    texts: Sequence[TextIds], output: VectorKind, dimensions: int | None, options: EmbedOptions
) -> Embed:
    """The embed command of these texts, without its call and epoch. Raises `BadRequest`, naming the field."""
    command = Embed(
        call=0,
        request=secrets.token_hex(8),
        epoch=bytes(8),
        texts=[[0]],
        output=output,
        dimensions=dimensions,
        priority=options.get("priority", BATCH),
        deadline_ms=options.get("deadline_ms"),
        cache_scope=options.get("cache_scope"),
        cache_salt=options.get("cache_salt", ""),
    )
    pairs = any(text.second for text in texts)
    # The ids are a tokenizer's, or were checked when they were given.
    return msgspec.structs.replace(
        checked_command(command, _embed_decoder),
        texts=[text.ids for text in texts],
        second=[text.second for text in texts] if pairs else [],
    )


def request_of(command: Embed) -> Request:
    options = RequestOptions(
        request_id=command.request, seed=0, max_tokens=None, priority=command.priority,
        deadline_ms=command.deadline_ms,
    )  # fmt: skip
    return Request([], options, texts=command)


def check_embed(command: Embed, limits: Limits, model: ModelCard) -> None:
    """Raise the error with which this worker would reject the command."""
    if (command.cache_salt or command.cache_scope) and not limits.cache_salt:
        raise BadRequest("this worker is older than cache_scope and cache_salt of texts")
    check_vectors(Vectors(command.texts, command.second, command.output, command.dimensions), model, limits)


def embed_message(command: Embed, have: int, call: int, epoch: bytes, deadline_ms: int | None) -> Embed:
    """The command without the texts that have a vector already."""
    return msgspec.structs.replace(
        command,
        call=call,
        epoch=epoch,
        texts=command.texts[have:],
        second=command.second[have:],
        first_index=have,
        deadline_ms=deadline_ms,
    )


def end_of_embed(command: Embed, have: int) -> End | None:
    """The lost end of an embed, if every vector was received."""
    if have < len(command.texts):
        return None
    return End("stop", prompt_tokens=sum(map(len, command.texts)))


def to_array(vectors: Sequence[bytes], width: int) -> npt.NDArray[np.float32]:
    """Vectors of `width` floats as an array (texts, floats) of float32.

    Raises `BadRequest` where numpy is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise BadRequest("embed gives numpy arrays: pip install numpy") from None
    return np.frombuffer(b"".join(vectors), "<f4").astype(np.float32).reshape(len(vectors), width)
