"""Messages to frames and back. A decoder never raises anything but an error of `zmqengine.errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar, cast, get_args

import msgspec

from zmqengine.errors import BadRequest, TooLarge, UnsupportedProtocol
from zmqengine.protocol import messages
from zmqengine.protocol.messages import FRAME_BYTES_MAX, MAGIC, CallId, Message, RequestId
from zmqengine.protocol.printable import printable
from zmqengine.sampling_params import LOGIT_BIAS_MAX, TOKEN_ID_MAX, Bias, Sampling, TokenId

_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")
T = TypeVar("T")


def encode(message: Message) -> tuple[bytes, bytes]:
    """The header and body frames of a message."""
    return MAGIC + message.KIND, _encoder.encode(message)


# What the decoders of msgspec raise on hostile bytes, beside their own errors.
_UNREADABLE = (RecursionError, UnicodeDecodeError, OverflowError, MemoryError)


class _Call(msgspec.Struct, frozen=True):
    call: CallId = 0


class _Request(msgspec.Struct, frozen=True):
    request: RequestId | None = None


class Addressee(NamedTuple):
    """The readable part of a rejected message, so that the rejection names its call."""

    call: int = 0
    request: str | None = None


class Decoder(Generic[M]):
    """Decodes one direction of one socket: only the messages of that union are known."""

    def __init__(self, union: object, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        types = cast("tuple[type[Message], ...]", get_args(union))
        self._decoders = {MAGIC + cls.KIND: msgspec.msgpack.Decoder(cls) for cls in types}
        self._frame_bytes_max = frame_bytes_max

    def decode(self, frames: Sequence[bytes | memoryview]) -> M:
        """The message in `[header, body]`; an image's pixels are a view of the body.

        Raises `BadRequest`, `TooLarge` or, for another version's magic, `UnsupportedProtocol`.
        """
        if len(frames) != 2:
            raise BadRequest(f"expected 2 frames (header, body), got {len(frames)}")
        header, body = frames
        decoder = self._decoders.get(bytes(header))
        if decoder is None:
            raise _header_error(bytes(header))
        if len(body) > self._frame_bytes_max:
            raise TooLarge(f"a body of {len(body)} bytes is over the limit of {self._frame_bytes_max}")
        try:
            return cast(M, decoder.decode(body))
        except msgspec.MsgspecError as error:
            if decoder.type is messages.Insert and "logit_bias" in str(error):
                insert = _with_other_bias(body)
                if insert is not None:
                    return cast(M, insert)
            # It quotes unknown keys, which hold whatever a front-end put there.
            raise BadRequest(printable(str(error))) from None
        except _UNREADABLE as error:
            raise BadRequest(f"the body cannot be decoded: {type(error).__name__}") from None


# Some languages have maps with keys of strings only, or none that their msgpack writes.
_BiasId = TokenId | Annotated[str, msgspec.Meta(max_length=len(str(TOKEN_ID_MAX)))]
_AtMost = msgspec.Meta(max_length=LOGIT_BIAS_MAX)
_OtherBias = Annotated[dict[_BiasId, Bias], _AtMost] | Annotated[list[tuple[_BiasId, Bias]], _AtMost]


class _OtherSampling(Sampling, frozen=True):
    logit_bias: _OtherBias = msgspec.field(default_factory=dict)  # type: ignore[assignment]


class _OtherInsert(messages.Insert, frozen=True):
    sampling: _OtherSampling = _OtherSampling()


_other_insert = msgspec.msgpack.Decoder(_OtherInsert)


def _with_other_bias(body: bytes | memoryview) -> messages.Insert | None:
    """The insert whose `logit_bias` has decimal strings as keys or is a list of pairs; None if that is not its fault.

    Every field is decoded as its own type, so a refused body costs no more than two that are accepted.
    """
    try:
        other = _other_insert.decode(body)
        bias = other.sampling.logit_bias
        pairs = bias.items() if isinstance(bias, dict) else bias
        sampling = msgspec.convert(
            {
                **msgspec.structs.asdict(other.sampling),
                "logit_bias": {_integer(id_): value for id_, value in pairs},
            },
            Sampling,
        )
    except (msgspec.MsgspecError, *_UNREADABLE):
        return None
    return messages.Insert(**{**msgspec.structs.asdict(other), "sampling": sampling})


def _integer(id_: int | str) -> int | str:
    # "007" or " 7" would be a second spelling of one id.
    return int(id_) if isinstance(id_, str) and id_.isdecimal() and str(int(id_)) == id_ else id_


def read_addressee(body: bytes | memoryview) -> Addressee:
    """The call and request of a body that was refused, each if it can be read.

    One of them may be the fault itself: a refusal without its call would leave the front-end waiting.
    """
    call, request = _read(_call, body), _read(_request, body)
    return Addressee(call.call if call else 0, request.request if request else None)


_call = msgspec.msgpack.Decoder(_Call)
_request = msgspec.msgpack.Decoder(_Request)


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, *_UNREADABLE):
        return None


def _header_error(header: bytes) -> BadRequest | UnsupportedProtocol:
    if len(header) != 4:
        return BadRequest(f"the header must be {MAGIC.decode()} and one type byte, got {len(header)} bytes")
    if header[:2] == MAGIC[:2] and header[:3] != MAGIC:
        return UnsupportedProtocol(f"this worker speaks {MAGIC.decode()}, not {header[:3]!r}")
    if header[:3] != MAGIC:
        return BadRequest(f"wrong magic {header[:3]!r}, expected {MAGIC!r}")
    return BadRequest(f"unknown message type {header[3:]!r} on this socket")


REPLY_BYTES_MAX = 4 * FRAME_BYTES_MAX


def command_decoder(frame_bytes_max: int = FRAME_BYTES_MAX) -> Decoder[messages.Command]:
    """Decoder of commands, for the worker."""
    return Decoder(messages.Command, frame_bytes_max=frame_bytes_max)


def command_reply_decoder() -> Decoder[messages.CommandReply]:
    """Decoder of the replies to commands, for a front-end."""
    return Decoder(messages.CommandReply, frame_bytes_max=REPLY_BYTES_MAX)


def output_decoder() -> Decoder[messages.Output]:
    """Decoder of outputs without their topic frame, for a front-end."""
    return Decoder(messages.Output, frame_bytes_max=REPLY_BYTES_MAX)


def control_decoder(frame_bytes_max: int = 65_536) -> Decoder[messages.ControlRequest]:
    """Decoder of control requests, for the worker."""
    return Decoder(messages.ControlRequest, frame_bytes_max=frame_bytes_max)


def control_reply_decoder() -> Decoder[messages.ControlReply]:
    """Decoder of control replies, for a front-end."""
    return Decoder(messages.ControlReply, frame_bytes_max=REPLY_BYTES_MAX)
