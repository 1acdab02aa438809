"""Each field's bounds, and bytes that no honest front-end sends."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from zmqengine import request_rules
from zmqengine.errors import BadRequest, ContextExceeded, TooLarge, UnsupportedProtocol, ZmqEngineError
from zmqengine.protocol import codec
from zmqengine.protocol.messages import FRAME_BYTES_MAX, Command, Insert
from zmqengine.protocol.printable import printable

DECODER: codec.Decoder[Command] = codec.command_decoder()
INSERT: dict[str, Any] = {"call": 2, "request": "r1", "epoch": b"12345678", "prompt": [5], "max_tokens": 64}
HELLO: dict[str, Any] = {"call": 1, "protocol": [1, 1], "client": "c", "session_secret": b"0123456789abcdef"}
RESUME: dict[str, Any] = {"call": 1, "request": "r1", "epoch": b"12345678", "from_index": 0}

# Field, allowed values at its edges, refused values just past them.
EDGES: list[tuple[bytes, dict[str, Any], str, list[Any], list[Any]]] = [
    (b"I", INSERT, "call", [0, 2**63 - 1], [-1, 2**63, 2**64 - 1, 1.0, "1", None, True]),
    (b"I", INSERT, "request", ["a", "x" * 64, "é" * 64], ["", "x" * 65, b"r1", 1, None]),
    (b"I", INSERT, "epoch", [b"\0" * 8], [b"", b"\0" * 7, b"\0" * 9, "12345678", None]),
    (
        b"I",
        INSERT,
        "prompt",
        [[0], [2**31 - 1]],
        [[], [-1], [2**31], [2**64 - 1], [1.0], ["1"], [None], [[1]], None],
    ),
    (b"I", INSERT, "max_tokens", [1, 2**31 - 1, None], [0, -1, 2**31, 2**63, 1.5, "9"]),
    (b"I", INSERT, "emitted", [[], [0]], [[-1], [2**31], [1.0], None, {}]),
    (b"I", INSERT, "seed", [None, 0, 2**63 - 1], [-1, 2**63, 1.0, "7"]),
    (b"I", INSERT, "stop_token_ids", [[], [0] * 128], [[0] * 129, [-1], [2**31], [1.0], 4, None]),
    (b"I", INSERT, "ignore_eos", [True, False], [0, 1, "true", None]),
    (b"I", INSERT, "logprobs", [None, 0, 20], [-1, 21, 1.0, True, "1"]),
    (b"I", INSERT, "priority", [-100, 100], [-101, 101, 0.5, None]),
    (b"I", INSERT, "deadline_ms", [None, 1, 86_400_000], [0, -1, 86_400_001, 1.0]),
    (
        b"I",
        INSERT,
        "constraint",
        [
            None,
            *({"kind": "regex", "text": "a" * length} for length in (0, 65_536)),
            {"kind": "choice", "choices": ["a", "b" * 4096]},
            {"kind": "choice", "choices": ["a"] * 1024, "after": [0] * 16},
        ],
        [
            {"kind": "poem"},
            {"kind": "regex", "text": "a" * 65_537},
            {"kind": "choice", "choices": [""]},
            {"kind": "choice", "choices": ["b" * 4097]},
            {"kind": "choice", "choices": ["a"] * 1025},
            {"kind": "json", "after": [0] * 17},
            {"kind": "json", "after": [-1]},
            {"kind": "json", "nonsense": 1},
            "json",
        ],
    ),
    (b"I", INSERT, "nonsense", [], [0, None]),
    (
        b"H",
        HELLO,
        "protocol",
        [[0, 0], [1, 2**31 - 1]],
        [[-1, 1], [1], [1, 1, 1], [1, 2**31], [1.0, 2.0], 1, None],
    ),
    (b"H", HELLO, "client", ["", "x" * 128], ["x" * 129, b"c", None]),
    (b"H", HELLO, "session_secret", [b"x" * 16, b"x" * 64], [b"x" * 15, b"x" * 65, "x" * 16, None]),
    (b"U", RESUME, "from_index", [0, 2**31 - 1], [-1, 2**31, 1.0, None]),
    (b"K", {"call": 1}, "requests", [[], ["r"] * 4096], [["r"] * 4097, [""], ["x" * 65], [1], "r", None]),
]
SAMPLING_EDGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 0.0, -0.0, 100.0], [-1e-9, 100.1]),
    ("top_p", [5e-324, 1], [0.0, -0.0, 1.0001]),
    ("top_k", [0, 2**31 - 1], [-1, 2**31, 2.0]),
    ("min_p", [0.0, -0.0, 1.0], [-5e-324, 1.1]),
    ("repetition_penalty", [0.01, 100.0], [0.0, -0.0, 0.0099, 1e-300, 100.1]),
    ("presence_penalty", [-2.0, -0.0, 2.0], [-2.1, 2.1]),
    ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
    ("min_tokens", [0, 2**31 - 1], [-1, 2**31, 2.0]),
    (
        "logit_bias",
        [{}, {0: -100.0, 2**31 - 1: 100}],
        [
            {-1: 0.0},
            {2**31: 0.0},
            {"-1": 0.0},
            {"01": 0.0},
            {" 1": 0.0},
            {"a": 0.0},
            {"1": 101.0},
            {1: 101.0},
            {1.0: 0.0},
            [1, 2],
            [[1, 2, 3]],
            [[1, 101.0]],
            "1",
        ],
    ),
    ("nonsense", [], [0]),
]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, 1e308, 2**64 - 1, True, "0", None, [], {}]


def decode(kind: bytes, body: object) -> Command:
    return DECODER.decode([b"ZE1" + kind, body if isinstance(body, bytes) else msgpack.packb(body)])


@pytest.mark.parametrize(
    ("kind", "base", "name", "allowed", "refused"), EDGES, ids=lambda value: str(value)[:20]
)
def test_a_field_takes_what_is_on_its_edge_and_refuses_what_is_past_it(
    kind: bytes, base: dict[str, Any], name: str, allowed: list[Any], refused: list[Any]
) -> None:
    """Both edges of every field of every command, and wrong types; the refusal names the field."""
    for value in allowed:
        decode(kind, {**base, name: value})
    for value in refused:
        with pytest.raises(BadRequest, match=name):
            decode(kind, {**base, name: value})


def test_the_name_of_a_session_has_its_edges_on_ctl() -> None:
    """The one field of a control request that is text with bounds of its own."""

    def end(session: object) -> None:
        body = {"call": 1, "session": session, "request": "r"}
        codec.control_decoder().decode([b"ZE1X", msgpack.packb(body)])

    for allowed in ("s", "s" * 64):
        end(allowed)
    for refused in ("", "s" * 65, b"s", None):
        with pytest.raises(BadRequest, match="session"):
            end(refused)


@pytest.mark.parametrize(("name", "allowed", "refused"), SAMPLING_EDGES, ids=lambda value: str(value)[:20])
def test_a_sampling_field_takes_its_edges_and_refuses_the_rest(
    name: str, allowed: list[Any], refused: list[Any]
) -> None:
    """vllm-mlx #799: an unknown field is refused by name, and so is a value out of range or not finite."""
    for value in allowed:
        decoded = decode(b"I", {**INSERT, "sampling": {name: value}})
        assert isinstance(decoded, Insert)
        assert getattr(decoded.sampling, name) == value
    for value in [*refused, *NOT_NUMBERS]:
        if value in ({}, []) and name == "logit_bias":
            continue
        with pytest.raises(BadRequest, match=name):
            decode(b"I", {**INSERT, "sampling": {name: value}})


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, True, "1", None])
def test_a_bias_that_is_no_finite_number_is_refused(bias: object) -> None:
    """The values of logit_bias have bounds too, and at most 1024 of them fit."""
    with pytest.raises(BadRequest, match="logit_bias"):
        decode(b"I", {**INSERT, "sampling": {"logit_bias": {3: bias}}})
    decode(b"I", {**INSERT, "sampling": {"logit_bias": dict.fromkeys(range(1024), 1.0)}})
    with pytest.raises(BadRequest, match="logit_bias"):
        decode(b"I", {**INSERT, "sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}})


@pytest.mark.parametrize(
    "bias", [{17: -1.5, 3: 2.0}, {"17": -1.5, "3": 2}, [[17, -1.5], [3, 2.0]], [["17", -1.5], [3, 2]]]
)
def test_a_bias_means_the_same_however_a_language_can_write_it(bias: object) -> None:
    """Some languages have maps with keys of strings only, or none that their msgpack writes."""
    insert = decode(b"I", {**INSERT, "sampling": {"logit_bias": bias}})
    assert insert.sampling.logit_bias == {17: -1.5, 3: 2.0}
    assert insert.epoch == INSERT["epoch"]


def test_the_longest_id_of_a_token_may_be_a_string() -> None:
    """As many digits as the largest id has are read, and one id more is refused."""
    insert = decode(b"I", {**INSERT, "sampling": {"logit_bias": {str(2**31 - 1): 1.0}}})
    assert insert.sampling.logit_bias == {2**31 - 1: 1.0}
    for over in (2**31, 10**10):
        with pytest.raises(BadRequest, match="logit_bias"):
            decode(b"I", {**INSERT, "sampling": {"logit_bias": {str(over): 1.0}}})


MALFORMED_BIASES: dict[str, object] = {
    "no number": {"x": 1.0},
    "a text": "text",
    "triples": [[1, 2, 3]],
    "a value that is none": {"1": "x"},
    "over the bound": [[1, 1.0]] * 1025,
    "nested": [[[1]]],
}


@pytest.mark.parametrize("bias", MALFORMED_BIASES.values(), ids=MALFORMED_BIASES)
def test_a_malformed_bias_costs_what_the_rest_of_the_body_costs(bias: object) -> None:
    """Nothing is decoded without its type: twice the prompt takes twice the memory, and no more than a good body."""

    def peak(tokens: int, sampling: object) -> int:
        body = msgpack.packb({**INSERT, "prompt": [70_000] * tokens, "sampling": sampling})
        tracemalloc.start()
        with contextlib.suppress(BadRequest):
            DECODER.decode([b"ZE1I", body])
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    malformed = {"logit_bias": bias}
    assert peak(20_000, malformed) <= 1.1 * peak(20_000, {})
    assert peak(40_000, malformed) <= 2.1 * peak(20_000, malformed)
    # What is malformed need not be small either.
    keys = {"logit_bias": {f"{index:064}": 1.0 for index in range(10_000)}}
    assert peak(1, keys) <= 64 * 1024


@pytest.mark.parametrize("missing", ["call", "request", "epoch", "prompt"])
def test_a_missing_field_is_refused_by_name(missing: str) -> None:
    """Fields without a default must be there."""
    with pytest.raises(BadRequest, match=missing):
        decode(b"I", {name: value for name, value in INSERT.items() if name != missing})


PING = msgpack.packb({"call": 1})
HOSTILE = {
    "nothing": b"",
    "truncated everywhere": msgpack.packb(INSERT)[:-1],
    "something after the end": PING + b"\0",
    "two bodies": PING + PING,
    "an array": msgpack.packb([1]),
    "nil": b"\xc0",
    "the byte that msgpack never uses": b"\xc1",
    "an ext as a value": b"\x81\xa4call\xd4\x05a",
    "a timestamp as a value": b"\x81\xa4call\xd6\xff\0\0\0\0",
    "an ext as a key": b"\x82\xd4\x05a\x01\xa4call\x01",
    "a number as a key": b"\x82\x01\x01\xa4call\x01",
    "a key of bad UTF-8": b"\x82\xa2\xff\xfe\x01\xa4call\x01",
    "nested arrays": b"\x82\xa4call\x01\xa1x" + b"\x91" * 100_000 + b"\x90",
    "nested maps": b"\x82\xa4call\x01\xa1x" + b"\x81\xa1a" * 100_000 + b"\x90",
    "maps nested in keys": b"\x82\xa4call\x01\xa1x" + b"\x81" * 100_000 + b"\x90",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a key of 4 gigabytes": b"\x81\xdb\xff\xff\xff\xff",
    "a text of 4 gigabytes": b"\x82\xa4call\x01\xa7request\xdb\xff\xff\xff\xff",
    "bytes of 4 gigabytes": b"\x82\xa4call\x01\xa5epoch\xc6\xff\xff\xff\xff",
    "an ignored value of 4 billion": b"\x82\xa4call\x01\xa1x\xdd\xff\xff\xff\xff",
    "a prompt of 4 billion": b"\x82\xa4call\x01\xa6prompt\xdd\xff\xff\xff\xff",
    "acks of 4 billion": b"\x82\xa4call\x01\xa8requests\xdd\xff\xff\xff\xff",
    "a bias of 4 billion": b"\x82\xa4call\x01\xa8sampling\x81\xaalogit_bias\xdf\xff\xff\xff\xff",
    "a request of bad UTF-8": b"\x82\xa4call\x01\xa7request\xa2\xff\xfe",
    "a request with a lone surrogate": b"\x82\xa4call\x01\xa7request\xa3\xed\xa0\x80",
}


@pytest.mark.parametrize("kind", [b"H", b"I", b"A", b"U", b"K"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_bad_request_and_take_no_memory(name: str, kind: bytes) -> None:
    """Nothing but BadRequest comes out, and a length that lies makes nobody allocate."""
    with allocating_at_most(bytes_max=2_000_000), pytest.raises(BadRequest):
        decode(kind, HOSTILE[name])
    with allocating_at_most(bytes_max=2_000_000):
        codec.read_addressee(HOSTILE[name])


def test_every_truncation_of_a_message_is_a_bad_request() -> None:
    """There is no cut at which half a message passes for a whole one."""
    body = msgpack.packb(
        {**INSERT, "sampling": {"logit_bias": {17: -1.0}}, "seed": 2**40, "stop_token_ids": [1, 2]}
    )
    for length in range(len(body)):
        with pytest.raises(BadRequest):
            decode(b"I", body[:length])


def test_the_last_of_two_equal_keys_counts() -> None:
    """A duplicate key is decoded as most msgpack libraries do, and cannot get a value past its bounds."""
    assert decode(b"P", b"\x82\xa4call\x01\xa4call\x02").call == 2
    with pytest.raises(BadRequest):
        decode(b"P", b"\x82\xa4call\xff\xa4call\x02")


def test_unknown_keys_are_ignored_but_not_in_an_insert() -> None:
    """A newer front-end may say more, except where something would silently not be done."""
    assert decode(b"A", {"call": 3, "request": "r", "new": [1, {"x": 2}]}).call == 3
    with pytest.raises(BadRequest, match="unknown field `new`"):
        decode(b"I", {**INSERT, "new": 1})


def test_a_million_tokens_are_decoded_or_refused_in_bounded_memory() -> None:
    """A prompt up to the frame's bound costs at most ten times its bytes; one byte more is TooLarge."""
    body = msgpack.packb({**INSERT, "prompt": [1] * 1_000_000})
    with allocating_at_most(bytes_max=10 * len(body)):
        decoded = decode(b"I", body)
    assert isinstance(decoded, Insert)
    assert len(decoded.prompt) == 1_000_000
    long = bytes(FRAME_BYTES_MAX + 1)
    with allocating_at_most(bytes_max=1_000_000), pytest.raises(TooLarge, match=str(FRAME_BYTES_MAX)):
        DECODER.decode([b"ZE1I", long])
    with pytest.raises(BadRequest):
        DECODER.decode([b"ZE1I", bytes(FRAME_BYTES_MAX)])


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "got 0"),
        ([b"ZE1P"], "got 1"),
        ([b"ZE1P", PING, b""], "got 3"),
        ([b""] * 10_000, "got 10000"),
        ([b"", PING], "got 0 bytes"),
        ([b"ZE1", PING], "got 3 bytes"),
        ([b"ZE2", PING], "got 3 bytes"),
        ([b"ZE1PP", PING], "got 5 bytes"),
        ([b"ZE2PP", PING], "got 5 bytes"),
        ([b"ZE1\xff", PING], "unknown message type"),
        ([b"ZE1D", PING], "unknown message type b'D'"),
        ([b"ZE1h", PING], "unknown message type b'h'"),
        ([b"HTTP", PING], "wrong magic b'HTT'"),
    ],
)
def test_a_wrong_header_or_frame_count_is_refused(frames: list[bytes], said: str) -> None:
    """The refusal says which of them it is; a message of another socket is unknown here."""
    with pytest.raises(BadRequest) as caught:
        DECODER.decode(frames)
    assert caught.type is BadRequest
    assert said in caught.value.message


@pytest.mark.parametrize("frames", [[b"ZE2P", PING], [b"ZE0P", b""]])
def test_another_version_is_told_what_is_spoken_here(frames: list[bytes]) -> None:
    """By the magic alone: its bodies may be anything."""
    with pytest.raises(UnsupportedProtocol, match=r"speaks ZE1, not b'ZE[02]'"):
        DECODER.decode(frames)


def test_a_refusal_quotes_an_unknown_key_short_and_printable() -> None:
    """What a front-end wrote cannot forge a log line, nor make the refusal longer than a line."""
    with pytest.raises(BadRequest) as caught:
        decode(b"I", {**INSERT, "a\nWARNING \x1b[31m": 1})
    assert caught.value.message.isprintable()
    with pytest.raises(BadRequest) as caught:
        decode(b"I", {**INSERT, "n" * 1_000_000: 1})
    assert len(caught.value.message) <= 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("é" * 20, "é" * 20),
        ("x" * 21, "x" * 17 + "..."),
        ("x" * 19 + "\n", "x" * 17 + "..."),
        ("x" * 18 + "\n", "x" * 18 + r"\n"),
        ("x" * 17 + "\n", "x" * 17 + r"\n"),
        ("\n" * 21, r"\n" * 8 + "\\" + "..."),
        ("\n" + "x" * 20, r"\n" + "x" * 15 + "..."),
        ("é\x1b[31m\x00\ud800", r"é\x1b[31m\x00\ud800"),
    ],
)
def test_the_text_of_a_stranger_is_one_line_of_a_bounded_length(text: str, shown: str) -> None:
    """As it is where it can be; escapes count by their own length, and what is cut says so."""
    assert printable(text, 20) == shown


def test_a_refusal_finds_the_call_although_the_request_is_at_fault() -> None:
    """The call is read alone when the request cannot be, and the other way round, so nobody waits."""
    assert codec.read_addressee(msgpack.packb({"call": 5, "request": "x" * 65})) == (5, None)
    assert codec.read_addressee(msgpack.packb({"call": -5, "request": "r1"})) == (0, "r1")
    assert codec.read_addressee(msgpack.packb({**INSERT, "prompt": "text"})) == (2, "r1")
    assert codec.read_addressee(b"\xc1") == (0, None)


@contextmanager
def allocating_at_most(*, bytes_max: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= bytes_max
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("ids", "odd"),
    [([], None), ([0, 9], None), ([10], 10), ([3, 12, -1], 12), ([-1, 3], -1), ({4: 1.0, -2: 1.0}, -2)],
)
def test_a_token_id_is_one_of_the_models(ids: Any, odd: int | None) -> None:
    """An id outside the vocabulary, on either side, is read in MLX without a check."""
    fault = None if odd is None else f"token id {odd} is outside the vocabulary of 10"
    assert request_rules.outside_vocabulary(ids, 10) == fault


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ([[1], []], BadRequest, "text 1 is empty"),
        ([[1], [2, 10], [11]], BadRequest, "text 1: token id 10 is outside the vocabulary of 10"),
        ([[1] * 5, [1] * 6, [2]], ContextExceeded, "text 1 has 6 tokens, over the 5"),
        ([[1]] * 4, BadRequest, "texts: 4, the worker takes 3 at once"),
        ([[0, 9], [9] * 5, [3]], None, ""),
    ],
)
def test_the_first_text_that_a_model_cannot_read_is_named(
    texts: list[list[int]], error: type[ZmqEngineError] | None, message: str
) -> None:
    """Empty, too long or of ids that it does not have."""
    model = SimpleNamespace(name="m", vocab_size=10, dimensions=4, labels=0)
    limits = SimpleNamespace(context_tokens_max=5, texts_max=3)
    raised = contextlib.nullcontext() if error is None else pytest.raises(error, match=message)
    with raised:
        request_rules.check_vectors(request_rules.Vectors(texts), model, limits)


def test_a_request_fits_the_context_to_the_last_token() -> None:
    """Prompt and output together; an open end wants one token. A prediction is as long as the worker takes."""
    for prompt, max_tokens in ((9, None), (9, 1), (3, 7)):
        request_rules.check_context([1] * prompt, max_tokens, 10)
    for prompt, max_tokens, said in (
        (10, None, "prompt of 10 tokens is over the context of 10 tokens"),
        (3, 8, r"prompt of 3 tokens \+ max_tokens 8 is over"),
    ):
        with pytest.raises(ContextExceeded, match=said):
            request_rules.check_context([1] * prompt, max_tokens, 10)
    request_rules.check_prediction([1] * 4, 4)
    with pytest.raises(BadRequest, match="prediction: 5 tokens, the worker takes 4"):
        request_rules.check_prediction([1] * 5, 4)
