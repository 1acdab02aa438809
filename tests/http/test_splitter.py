"""Reasoning, content and calls apart, however the text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine_http.tool_calls import FORMATS, Delta, HarmonySplitter, Markers, Splitter

HERMES = Markers("<think>", "</think>", FORMATS["json_tools"])
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def split(
    text: str, cuts: list[int], markers: Markers = HERMES, *, calls: bool = True, reasoning_open: bool = False
) -> tuple[str, str, list[Delta]]:
    """The reasoning, the content and the calls in `text` when it comes in pieces."""
    splitter = Splitter(markers, calls=calls, reasoning_open=reasoning_open)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    deltas = [d for start, end in itertools.pairwise(places) for d in splitter.feed(text[start:end])]
    deltas += splitter.finish()
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    return reasoning, content, [delta for delta in deltas if delta.kind == "call"]


CUTS = st.lists(st.integers(0, 1000), max_size=40)


@given(CUTS)
def test_reasoning_content_and_calls_come_apart(cuts: list[int]) -> None:
    """The three are the same wherever the text is cut."""
    text = f"<think>\nhm </thin\n</think>\n\nI add.\n{CALL}\n{CALL}"
    reasoning, content, calls = split(text, cuts)
    assert reasoning == "hm </thin\n"
    assert content == "I add.\n"
    assert calls == [Delta("call", '{"a":1}', "add")] * 2


@given(CUTS)
def test_reasoning_may_be_open_already(cuts: list[int]) -> None:
    """Some templates end with the marker that starts reasoning."""
    assert split("hm</think>\n\nyes", cuts, reasoning_open=True) == ("hm", "yes", [])


@given(CUTS)
@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call> and on',
        "<tool_call>no call at all</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_text(broken: str, cuts: list[int]) -> None:
    """omlx #2012, mlx-lm #1441: what is no whole call comes out as it was written, and the stream goes on."""
    assert split(broken, cuts) == ("", broken, [])


@given(CUTS)
def test_markers_are_text_when_no_tools_were_offered(cuts: list[int]) -> None:
    """Nobody asked for calls, so there are none."""
    assert split(CALL, cuts, calls=False) == ("", CALL, [])


@given(CUTS)
def test_a_format_without_an_end_goes_on_to_the_end_of_the_output(cuts: list[int]) -> None:
    """Mistral's calls have no closing marker."""
    markers = Markers(calls=FORMATS["mistral"])
    reasoning, content, calls = split('Now: [TOOL_CALLS]add[ARGS]{"a": 1}', cuts, markers)
    assert (reasoning, content, calls) == ("", "Now: ", [Delta("call", '{"a":1}', "add")])


@given(CUTS)
def test_a_bare_object_is_a_call_where_the_family_writes_them_so(cuts: list[int]) -> None:
    """Llama 3 writes no marker; JSON that is no call stays text."""
    markers = Markers(calls=FORMATS["llama3_json"])
    assert split('{"name": "add", "parameters": {"a": 1}}', cuts, markers)[2] == [
        Delta("call", '{"a":1}', "add")
    ]
    assert split('{"sum": 2}', cuts, markers) == ("", '{"sum": 2}', [])
    assert split("Say {", cuts, markers) == ("", "Say {", [])


@given(st.text(alphabet='<>/tolcahink_{}":1 \n', max_size=80), CUTS)
def test_no_text_is_lost_and_arguments_always_parse(text: str, cuts: list[int]) -> None:
    """Whatever a model writes, the pieces do not depend on the cuts, and calls are JSON."""
    whole = split(text, [])
    assert split(text, cuts) == whole
    for call in whole[2]:
        assert isinstance(json.loads(call.text), dict)


HARMONY = (
    "<|channel|>analysis<|message|>hm < |<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@given(CUTS)
def test_channels_of_gpt_oss_come_apart(cuts: list[int]) -> None:
    """Analysis is reasoning, commentary to a function is a call, all else is content."""
    splitter = HarmonySplitter(calls=True)
    places = sorted({0, len(HARMONY), *(cut % len(HARMONY) for cut in cuts)})
    deltas = [d for start, end in itertools.pairwise(places) for d in splitter.feed(HARMONY[start:end])]
    deltas += splitter.finish()
    assert "".join(d.text for d in deltas if d.kind == "reasoning") == "hm < |"
    assert "".join(d.text for d in deltas if d.kind == "content") == "Let me see."
    assert [d for d in deltas if d.kind == "call"] == [Delta("call", '{"a":1}', "add")]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>final<|message|>Hello", "Hello"),
        ("Hello, plain", "Hello, plain"),
        ("<|channel|>commentary to=functions.add<|message|>{broken", "{broken"),
        ("<|channel|>analysis<|mess", ""),
    ],
)
def test_gpt_oss_text_that_is_cut_short_is_content(text: str, content: str) -> None:
    """What no channel claims, and a call that is none, is content; a header is never shown."""
    splitter = HarmonySplitter(calls=True)
    deltas = splitter.feed(text) + splitter.finish()
    assert "".join(delta.text for delta in deltas) == content
    assert all(delta.kind == "content" for delta in deltas)
