"""Properties of the codec over generated messages and bytes."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.protocol import specification
from zmqengine.errors import BadRequest, TooLarge, UnsupportedProtocol
from zmqengine.protocol import codec
from zmqengine.protocol.messages import Insert, TokenFrame
from zmqengine.sampling_params import Sampling

DECODERS: dict[str, codec.Decoder[Any]] = {
    name: codec.Decoder(union) for name, union in specification.UNIONS.items()
}
REFUSALS = (BadRequest, TooLarge, UnsupportedProtocol)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
sampling = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
)
inserts = st.builds(
    Insert,
    call=st.integers(0, 2**63 - 1),
    request=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64),
    epoch=st.binary(min_size=8, max_size=8),
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 2**31 - 1),
    emitted=token_ids,
    sampling=sampling,
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=128),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    priority=st.integers(-100, 100),
    deadline_ms=st.none() | st.integers(1, 86_400_000),
)
# What msgpack can say, in no shape in particular, with the protocol's own words as keys now and then.
words = st.sampled_from(
    sorted({name for cls in specification.message_classes() for name in cls.__struct_fields__})
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=70)
    | st.text(max_size=70)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(words | st.text(max_size=9), inner, max_size=6)
    ),
    max_leaves=25,
)
bodies = st.dictionaries(words, values, max_size=14)
kinds = st.sampled_from(sorted(specification.KINDS))


@given(inserts)
def test_an_insert_survives_the_wire(insert: Insert) -> None:
    """Every allowed insert is decoded as it was sent, by us and by another msgpack library."""
    frames = codec.encode(insert)
    assert DECODERS["command"].decode(frames) == insert
    elsewhere = msgpack.packb(msgpack.unpackb(frames[1], strict_map_key=False))
    assert DECODERS["command"].decode([frames[0], elsewhere]) == insert


@given(st.sampled_from(sorted(DECODERS)), kinds, bodies)
@example("command", "I", {"prompt": [2**64 - 1]})
def test_a_body_of_any_shape_is_decoded_or_refused(name: str, kind: str, body: dict[str, Any]) -> None:
    """Well-formed msgpack of the wrong shape raises nothing but a refusal."""
    _decode_or_refuse(name, [b"ZE1" + kind.encode(), msgpack.packb(body)])


@given(st.sampled_from(sorted(DECODERS)), st.lists(st.binary(max_size=80), max_size=4))
def test_any_frames_are_decoded_or_refused(name: str, frames: list[bytes]) -> None:
    """Arbitrary bytes raise nothing but a refusal, and their addressee can always be asked for."""
    _decode_or_refuse(name, frames)
    for frame in frames:
        call, request = codec.read_addressee(frame)
        assert 0 <= call < 2**63
        assert request is None or 1 <= len(request) <= 64


@pytest.mark.parametrize(("kind", "body"), specification.examples())
@given(data=st.data())
def test_a_damaged_example_is_decoded_or_refused(
    kind: str, body: dict[str, Any], data: st.DataObject
) -> None:
    """One byte changed, cut out or put in."""
    packed = bytearray(msgpack.packb(body))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for name, union in specification.UNIONS.items():
        if kind.encode() in {cls.KIND for cls in get_args(union)}:
            _decode_or_refuse(name, [b"ZE1" + kind.encode(), bytes(packed)])


def test_a_token_frame_without_rows_or_progress_is_the_smallest() -> None:
    """Defaults are left out on the wire."""
    header, body = codec.encode(TokenFrame(epoch=b"12345678", n=0))
    assert msgpack.unpackb(body) == {"epoch": b"12345678", "n": 0}
    assert header == b"ZE1t"


def _decode_or_refuse(name: str, frames: list[bytes]) -> None:
    try:
        message = DECODERS[name].decode(frames)
    except REFUSALS as error:
        refusal = error.message
    else:
        assert DECODERS[name].decode(codec.encode(message)) == message or "nan" in repr(message)
        return
    assert refusal.isprintable()
    assert 1 <= len(refusal) <= 300
