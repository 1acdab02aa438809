"""Events of a stream, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.sse_server import event
from zmqengine.bench.targets.sse import answer_of_body, answer_of_stream, tokens_of_chunks

STREAM = (
    b": keepalive\n\n"
    + event({"choices": [{"delta": {"role": "assistant"}}]})
    + event({"choices": [{"delta": {"reasoning_content": "so "}}]})
    + event({"choices": [{"delta": {"content": "one"}}]})
    + event({"choices": [{"delta": {"content": " two"}, "finish_reason": "length"}]})
    + event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    + b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True))
def test_an_event_is_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    """Its time is that of the piece with its last byte."""
    bounds = [0, *sorted(cuts), len(STREAM)]
    pieces = [(float(end), STREAM[start:end]) for start, end in pairwise(bounds)]
    answer = answer_of_stream(pieces)
    assert [text for _, text in answer.chunks] == ["so ", "one", " two"]
    assert (answer.finish, answer.done, answer.error) == ("length", True, "")
    for (at_s, _), marker in zip(answer.chunks, (b'"so "', b'"one"', b'" two"'), strict=True):
        end_of_event = STREAM.index(b"\n\n", STREAM.index(marker)) + 2
        assert at_s == min(bound for bound in bounds if bound >= end_of_event)


def test_a_record_has_the_servers_own_counts() -> None:
    """Prompt tokens and the number of tokens come from the usage."""
    record = answer_of_stream([(2.0, STREAM)]).record(1.0, 3.0, error="", cancelled=False, count_tokens=None)
    assert (record.prompt_tokens, record.tokens, record.finish, record.error) == (5, 3, "length", "")
    assert record.text == "so one two"


def test_an_error_event_in_mid_stream_is_an_error() -> None:
    """The tokens before it still count."""
    body = event({"choices": [{"text": "a"}]}) + event({"error": {"message": "out of memory"}})
    record = answer_of_stream([(1.0, body)]).record(0.0, 1.0, error="", cancelled=False, count_tokens=None)
    assert "out of memory" in record.error
    assert record.tokens == 1


def test_a_stream_without_an_end_is_an_error() -> None:
    """Neither a finish reason nor [DONE]: the server gave up without saying so."""
    body = event({"choices": [{"text": "a"}]})
    record = answer_of_stream([(1.0, body)]).record(0.0, 1.0, error="", cancelled=False, count_tokens=None)
    assert record.error == "the answer has no end"


def test_an_answer_that_was_not_streamed_arrives_with_its_last_byte() -> None:
    """All tokens at once."""
    body = b'{"choices": [{"text": "a b c", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}'
    record = answer_of_body([(1.0, body[:10]), (4.0, body[10:])]).record(
        0.0, 4.0, error="", cancelled=False, count_tokens=None
    )
    assert record.arrivals == [(4.0, 3)]


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("texts", "total", "expected"),
    [
        (["a", "b", "c"], None, [1, 1, 1]),
        (["a", "b", "c"], 3, [1, 1, 1]),
        (["a b", "c", "d e f"], 6, [2, 1, 3]),
        (["a b", "c d"], 8, [4, 4]),
        ([], 0, []),
    ],
)
def test_several_tokens_in_one_chunk_are_counted(
    texts: list[str], total: int | None, expected: list[int]
) -> None:
    """The usage says how many tokens there are, the texts say where they are."""
    assert tokens_of_chunks(texts, total, count_words) == expected


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1), st.integers(0, 500))
def test_counts_of_chunks_always_add_up_to_the_usage(texts: list[str], total: int) -> None:
    """Also where pieces of text do not tell how many tokens they were."""
    counts = tokens_of_chunks(texts, total, None)
    assert sum(counts) == total
    assert all(count >= 0 for count in counts)
