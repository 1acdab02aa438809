"""What must hold for any bytes given to the codec: one function that a fuzzer calls.

An input is one byte that chooses the decoder, the type byte and the body. An accepted insert is decoded a second
time, by the pure-Python decoder of another msgpack library: that one is instrumented, so coverage leads the
fuzzer through the format although our own decoder is compiled, and both must agree on what was said.
"""

from __future__ import annotations

from typing import Any

from msgpack import fallback

from tests.protocol import specification
from zmqengine.errors import BadRequest, TooLarge, UnsupportedProtocol
from zmqengine.protocol import codec
from zmqengine.protocol.messages import MAGIC, Insert

DECODERS: list[codec.Decoder[Any]] = [codec.Decoder(union) for union in specification.UNIONS.values()]


def check(data: bytes) -> bool:
    """Decode `data`; says whether it was accepted. Raises whatever is not a refusal: that is a finding."""
    selector, header, body = data[:1] or b"\0", data[1:2], data[2:]
    decoder = DECODERS[selector[0] % len(DECODERS)]
    _check_addressee(body)
    elsewhere = _decode_elsewhere(body)
    try:
        message = decoder.decode([MAGIC + header, body])
    except (BadRequest, TooLarge, UnsupportedProtocol) as error:
        _check_refusal(error.message)
        return False
    again = decoder.decode(codec.encode(message))
    assert again == message or "nan" in repr(message), "what was decoded does not survive the wire"
    if isinstance(message, Insert):
        assert isinstance(elsewhere, dict), "accepted bytes that another decoder refuses"
        assert list(message.prompt) == elsewhere["prompt"]
        assert (message.call, message.request) == (elsewhere["call"], elsewhere["request"])
    return True


def _check_refusal(reason: str) -> None:
    assert reason.isprintable()
    assert 1 <= len(reason) <= 300


def _check_addressee(body: bytes) -> None:
    call, request = codec.read_addressee(body)
    assert 0 <= call < 2**63
    assert request is None or 1 <= len(request) <= 64


def _decode_elsewhere(body: bytes) -> object:
    try:
        return fallback.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
