"""Tokens to text up to the end of a request: the same however the tokens came."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.client.text.test_stop_strings import naive
from zmqengine.errors import WorkerLost
from zmqengine.protocol.messages import End, TokenizerBundle, TokenLogprob, TokenRow
from zmqengine_client.core.chunks import TextChunk
from zmqengine_client.core.options import make_options
from zmqengine_client.core.request import Request
from zmqengine_client.text.text_reader import TextReader
from zmqengine_client.text.tokenizer import Tokenizer as ClientTokenizer

BYTES = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
# With a text of their own, as ids that end an output may be.
EOS, STOP = BYTES["y"], BYTES["z"]


def bytewise() -> ClientTokenizer:
    """A token a byte of UTF-8."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ClientTokenizer(
        TokenizerBundle(0, "", tokenizer.to_str().encode(), chat_template=None, eos_token_ids=[EOS])
    )


TOKENIZER = bytewise()


def new_reader(stops: list[str], *, ignore_eos: bool = False, logprobs: int | None = None) -> TextReader:
    """Of a request that has its tokenizer, and whose output may end with either token."""
    options = make_options({"stop_token_ids": [STOP], "ignore_eos": ignore_eos, "logprobs": logprobs})
    reader = TextReader(Request([1], options), stops)
    reader.start(TOKENIZER)
    return reader


def take_all(reader: TextReader) -> list[TextChunk]:
    """What there is to be taken now."""
    chunks = []
    while (chunk := reader.take()) is not None:
        chunks.append(chunk)
    return chunks


@given(
    text=st.text("ab é\n", max_size=16),
    stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    last=st.sampled_from([EOS, STOP, None]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
    data=st.data(),
)
def test_no_cut_of_the_tokens_shows(
    text: str,
    stops: list[str],
    last: int | None,
    ignore_eos: bool,
    logprobs: int | None,
    data: st.DataObject,
) -> None:
    """Text, tokens, their places and log-probabilities, against the whole output decoded at once."""
    if ignore_eos:
        text += "y"
        last = None if last == EOS else last
    ids = TOKENIZER.encode(text)
    output = ids if last is None else [*ids, last]
    reader = new_reader(stops, ignore_eos=ignore_eos, logprobs=logprobs)
    chunks: list[TextChunk] = []
    sent = 0
    while sent < len(output) and reader.wants_abort is False:
        row = output[sent : sent + data.draw(st.integers(1, len(output) - sent))]
        entries = [TokenLogprob(-float(sent + place), []) for place in range(len(row))]
        reader.request.receive(TokenRow(reader.request.id, sent, row, entries))
        sent += len(row)
        if data.draw(st.booleans()):
            chunks += take_all(reader)
    chunks += take_all(reader)
    if not reader.wants_abort:
        reader.request.end = End("length" if last is None else "stop", prompt_tokens=1)
        chunks += take_all(reader)

    want, match = naive(text, stops)
    kept = output
    if match is not None:
        kept = next(output[:n] for n in range(len(ids) + 1) if naive(decoded(ids[:n]), stops)[1] is not None)
    completion = reader.completion()
    assert reader.finished
    assert "".join(map(str, chunks)) == completion.text == want
    assert [token for chunk in chunks for token in chunk.tokens] == completion.tokens == kept
    assert (completion.stop_string, reader.failure()) == (match, None)
    assert completion.finish == ("length" if match is None and last is None else "stop")
    assert [chunk.first_index for chunk in chunks] == [
        sum(len(chunk.tokens) for chunk in chunks[:place]) for place in range(len(chunks))
    ]
    for chunk in chunks:
        told = range(chunk.first_index, chunk.first_index + len(chunk.tokens))
        expected = None if logprobs is None else [TokenLogprob(-float(place), []) for place in told]
        assert chunk.logprobs == expected


def decoded(ids: list[int]) -> str:
    """Without what is only the beginning of a character."""
    return TOKENIZER.decode(ids).rstrip("\ufffd")


def test_nothing_is_given_before_the_tokenizer_is_there() -> None:
    """Not even the end, unless nothing will ever come."""
    reader = TextReader(Request([1], make_options({})), [])
    reader.request.receive(TokenRow(reader.request.id, 0, TOKENIZER.encode("ab")))
    assert reader.take() is None
    assert not reader.finished
    reader.start(TOKENIZER)
    assert [chunk.text for chunk in take_all(reader)] == ["ab"]


@pytest.mark.parametrize("known", [False, True])
def test_an_error_ends_the_text_and_is_told(known: bool) -> None:
    """With a tokenizer or without."""
    reader = TextReader(Request([1], make_options({})), ["x"])
    if known:
        reader.start(TOKENIZER)
    reader.request.refuse(WorkerLost("it is gone"))
    assert reader.take() is None
    assert reader.finished
    assert isinstance(reader.failure(), WorkerLost)
    assert reader.completion().finish == WorkerLost.code


def test_after_a_stop_string_the_worker_may_stop_and_cannot_fail() -> None:
    """The text is whole: what the worker does then is nobody's business any more."""
    reader = new_reader(["b"])
    reader.request.receive(TokenRow(reader.request.id, 0, TOKENIZER.encode("abab")))
    assert not reader.wants_abort
    assert [chunk.text for chunk in take_all(reader)] == ["a"]
    assert (reader.wants_abort, reader.finished) == (True, True)
    reader.request.receive(TokenRow(reader.request.id, 4, TOKENIZER.encode("a")))
    assert reader.take() is None
    reader.request.error = WorkerLost("it is gone")
    assert not reader.wants_abort
    assert reader.failure() is None
    completion = reader.completion()
    assert (completion.finish, completion.message, completion.stop_string) == ("stop", "", "b")
    assert completion.tokens == TOKENIZER.encode("ab")


def test_half_a_character_is_told_at_the_end_and_may_hold_nothing_back() -> None:
    """As one that cannot be read; until then it is held back, and so is what may become a stop string."""
    reader = new_reader(["ax"], logprobs=0)
    first, *_ = TOKENIZER.encode("é")
    tokens, entries = [*TOKENIZER.encode("ba"), first], [TokenLogprob(-1.0, [])] * 3
    reader.request.receive(TokenRow(reader.request.id, 0, tokens, entries))
    assert take_all(reader) == [TextChunk("b", tokens, entries, 0)]
    reader.request.end = End("length", prompt_tokens=1)
    assert take_all(reader) == [TextChunk("a\ufffd", [], [], 3)]
    assert reader.completion().text == "ba\ufffd"
