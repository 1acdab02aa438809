"""Reasoning, content and calls apart, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqengine_client.text.tool_calls import (
    FORMATS,
    Delta,
    HarmonySplitter,
    Markers,
    MarkerSplitter,
    find_markers,
    make_splitter,
)
from zmqengine_client.text.tool_calls.deltas import overlap
from zmqengine_client.text.tool_calls.lenient_json import read_whole

HERMES = Markers("<think>", "</think>", FORMATS["json_tools"])
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "held"), [("", 0), ("a", 0), ("<", 1), ("a<ta", 3), ("<tag", 4), ("a<tag>", 0), ("<tag>x<t", 2)]
)
def test_an_end_that_may_begin_a_marker_is_held(text: str, held: int) -> None:
    """Less than the whole marker, which is found elsewhere."""
    assert overlap(text, "<tag>") == held


def split(
    text: str,
    cuts: list[int],
    markers: Markers = HERMES,
    *,
    calls: bool = True,
    reasoning_open: bool = False,
    schemas: Mapping[str, Mapping[str, object]] | None = None,
) -> tuple[str, str, list[Delta]]:
    """The reasoning, the content and the calls in `text` when it comes in pieces."""
    splitter = MarkerSplitter(markers, calls=calls, reasoning_open=reasoning_open, schemas=schemas)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    deltas = [d for start, end in itertools.pairwise(places) for d in splitter.feed(text[start:end])]
    deltas += splitter.finish()
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    return reasoning, content, joined_calls(deltas)


def joined_calls(deltas: list[Delta]) -> list[Delta]:
    """Calls that came in pieces as whole ones; still a `call_start` where the end did not come."""
    calls: list[Delta] = []
    for delta in deltas:
        if delta.kind == "call":
            calls.append(delta)
        elif delta.kind == "call_start":
            calls.append(Delta("call_start", "", delta.name))
        elif delta.kind == "call_text":
            calls[-1] = calls[-1]._replace(text=calls[-1].text + delta.text)
        elif delta.kind == "call_end":
            calls[-1] = calls[-1]._replace(kind="call")
    return calls


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
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"{CALL}\n\nI have added them.", "I have added them."),
        (f"{CALL}\n \n{CALL} \n", ""),
        (f"One moment. \n{CALL} and\n\n done\n", "One moment. \n and\n\n done\n"),
    ],
)
def test_white_space_behind_a_call_is_content_where_something_follows(
    text: str, content: str, cuts: list[int]
) -> None:
    """However it is cut: alone it belongs to the format, between words it does not."""
    assert split(text, cuts)[1] == content


@given(CUTS)
def test_an_end_of_reasoning_that_had_no_start_is_no_content(cuts: list[int]) -> None:
    """Models that are told not to reason begin so; in the midst of an answer it is text."""
    assert split("\n</think>\n\nYes.", cuts) == ("", "Yes.", [])
    assert split(f"</think>{CALL}", cuts) == ("", "", [Delta("call", '{"a":1}', "add")])
    assert split("hm</think></think>Yes.", cuts, reasoning_open=True) == ("hm", "Yes.", [])
    assert split("Say </think>", cuts) == ("", "Say </think>", [])


@given(CUTS)
def test_what_frames_the_content_is_left_out(cuts: list[int]) -> None:
    """Command R puts its answers between markers."""
    markers = find_markers(
        {}, "<|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> <|START_ACTION|> tools"
    )
    text = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert split(text, cuts, markers) == ("hm", "Yes.", [])
    assert split(text, cuts, markers, calls=False) == ("hm", "Yes.", [])
    # Solar Open ends its reasoning with what is a frame of the content.
    markers = find_markers({}, "<|think|> <|content|> <|tool_call:begin|>")
    text = "<|think|>hm<|end|><|begin|>assistant<|content|>Yes.<|end|>"
    assert split(text, cuts, markers) == ("hm", "Yes.", [])


@given(CUTS)
def test_reasoning_may_be_open_already(cuts: list[int]) -> None:
    """Some templates end with the marker that starts reasoning."""
    assert split("hm</think>\n\nyes", cuts, reasoning_open=True) == ("hm", "yes", [])


@given(CUTS)
@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>no call at all</tool_call>",
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


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("pythonic", "[a(b=1), c()]"),
        ("json_list", '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'),
        ("mistral", '[{"name": "a", "arguments": {}}]'),
        ("apertus", '[{"a": {}}]'),
    ],
)
def test_calls_in_a_list_are_whole(name: str, inside: str) -> None:
    """An answer that ended with them was told to have been cut: finish_reason was length."""
    format_ = FORMATS[name]
    splitter = MarkerSplitter(Markers(calls=format_), calls=True)
    splitter.feed(format_.start + inside + format_.end)
    splitter.finish()
    assert splitter.saw_call
    assert not splitter.incomplete_call


@given(CUTS)
@pytest.mark.parametrize(
    ("text", "call"),
    [
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x',
            Delta("call_start", '{"a":1,"b":"x', "add"),
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', Delta("call", '{"a":1}', "add")),
        ('<tool_call>{"name": "add", "arguments": {"a": ]}}</tool_call>', Delta("call", '{"a":', "add")),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}',
            Delta("call", '{"a":"</tool_call>"}', "add"),
        ),
    ],
    ids=["cut", "unclosed", "malformed", "marker-inside"],
)
def test_a_call_that_has_begun_is_told_as_far_as_it_came(text: str, call: Delta, cuts: list[int]) -> None:
    """OpenAI sends the part of a call that was made; a client sees that its JSON is not whole."""
    assert split("Now:" + text, cuts) == ("", "Now:", [call])


def test_arguments_come_while_they_are_written() -> None:
    """A file of 10 KB that a tool is to write was silence until its end."""
    splitter = MarkerSplitter(HERMES, calls=True)
    text = '<tool_call>{"name": "write", "arguments": {"text": "' + "line\\n" * 100 + '"}}</tool_call>'
    pieces = [delta for character in text for delta in splitter.feed(character)]
    assert [delta.kind for delta in pieces][:2] == ["call_start", "call_text"]
    assert sum(delta.kind == "call_text" for delta in pieces) > 400
    (call,) = joined_calls(pieces)
    assert json.loads(call.text) == {"text": "line\n" * 100}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), st.booleans(), CUTS)
def test_streamed_arguments_are_those_that_were_written(
    arguments: dict[str, object], ascii_only: bool, cuts: list[int]
) -> None:
    """Any JSON, cut anywhere, escaped or not."""
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    (call,) = split(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>', cuts)[2]
    assert json.loads(call.text) == arguments
    assert call.kind == "call"


@given(CUTS)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{'a': 'it\\'s', b: True, c: None,}", {"a": "it's", "b": True, "c": None}),
        ('{"a": "two\nlines\\q", "d": [1, 2,], }', {"a": "two\nlines\\q", "d": [1, 2]}),
        ('{a:<|"|>say "hi" \\n<|"|>,n:-1.5e3}', {"a": 'say "hi" \\n', "n": -1500.0}),
        ('{"a": "\\ud83d\\ude00 \\ud83d!"}', {"a": "\U0001f600 \ufffd!"}),
    ],
)
def test_almost_json_becomes_json(written: str, meant: dict[str, object], cuts: list[int]) -> None:
    """What models write when they mean JSON, as the reader of whole calls takes it."""
    assert read_whole(written) == meant
    (call,) = split(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>', cuts)[2]
    assert json.loads(call.text) == meant


BAR, GAP = "\uff5c", "\u2581"
TYPED: dict[str, Any] = {
    "f": {"properties": {"a": {"type": "integer"}}},
    "g": {"properties": {"b": {"type": "string"}, "c": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}


def deepseek(*calls: str) -> str:
    return "".join(
        f"<{BAR}tool{GAP}call{GAP}begin{BAR}>{call}<{BAR}tool{GAP}call{GAP}end{BAR}>" for call in calls
    )


WRITTEN = {
    "mistral": (
        'f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "}"}',
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "}"}, "id": "a1"}]',
    ),
    "qwen3_coder": (
        "\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "<function=g>\n<parameter=b>\n}\n</parameter>\n</function>\n",
        "<function=f><parameter=a>1</parameter></function><function=g><parameter=b>}</parameter>",
    ),
    "minimax_m2": (
        '\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n<parameter name="b">}</parameter>\n</invoke>\n',
    ),
    "muse_spark": (
        '\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        '<atem:invoke name="g">\n<atem:parameter name="b">}</atem:parameter>\n</atem:invoke>\n',
    ),
    "seed_oss": (
        "\n<function=f>\n<parameter=a>1</parameter>\n</function>\n"
        "<function=g>\n<parameter=b>}</parameter>\n</function>\n",
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4"),
        (
            f'\n<{BAR}DSML{BAR}invoke name="f">\n<{BAR}DSML{BAR}parameter name="a" string="false">1'
            f"</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>\n"
            f'<{BAR}DSML{BAR}invoke name="g">\n<{BAR}DSML{BAR}parameter name="b" string="true">}}'
            f"</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>\n",
        ),
    ),
    "kimi_k3": (
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|open|>argument key="b" type="string"<|sep|>}'
        "<|close|>argument<|sep|><|close|>call<|sep|>",
    ),
    "cohere": (
        '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {"b": "}"}}\n]',
    ),
    "apertus": ('[{"f": {"a": 1}}, {"g": {"b": "}"}}]',),
    "json_list": (
        '[{"name": "f", "arguments": {"a": 1}, "id": "a1"}, {"name": "g", "arguments": {"b": "}"}, "id": "b2"}]',
        '\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": "}"}}\n',
    ),
    "olmo3": ("f(a=1)\ng(b='}')",),
    "solar_open": (
        "".join(
            f"<|tool_call:begin|>{name}1<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
            for name, arguments in (("f", '{"a": 1}'), ("g", '{"b": "}"}'))
        ),
    ),
    "hunyuan_v3": (
        "".join(
            f"\n<tool_call:opensource>{name}<tool_sep:opensource>\n<arg_key:opensource>{key}</arg_key:opensource>\n"
            f"<arg_value:opensource>{value}</arg_value:opensource>\n</tool_call:opensource>"
            for name, key, value in (("f", "a", "1"), ("g", "b", "}"))
        ),
    ),
    "gemma4": ('call:f{a:1}call:g{b:<|"|>}<|"|>}',),
    "function_gemma": ("call:f{a:1}call:g{b:<escape>}<escape>}",),
    "pythonic": ("[f(a=1), g(b='}')]", '[f( a = 1 ),g(b="}",)]'),
    "kimi_k2": (
        "".join(
            f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            for name, arguments in (("f:0", '{"a": 1}'), ("g:1", '{"b": "}"}'))
        ),
    ),
    "deepseek_v3": (
        deepseek(f'f<{BAR}tool{GAP}sep{BAR}>{{"a": 1}}', f'g<{BAR}tool{GAP}sep{BAR}>{{"b": "}}"}}'),
        deepseek(
            f'function<{BAR}tool{GAP}sep{BAR}>f\n```json\n{{"a": 1}}\n```',
            f'function<{BAR}tool{GAP}sep{BAR}>g\n```json\n{{"b": "}}"}}\n```',
        ),
    ),
}
ONE_EACH = ("glm47", "laguna", "minicpm5", "functionary", "minimax_m3")
"""Formats with one call between markers, and the one that is not told before its end."""
JSON_TWO = ('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": "}"}}',)


@settings(max_examples=25)
@given(CUTS)
@pytest.mark.parametrize(
    ("name", "inside"),
    [(name, inside) for name in FORMATS if name not in ONE_EACH for inside in WRITTEN.get(name, JSON_TWO)],
)
def test_every_format_tells_several_calls_as_they_come(name: str, inside: str, cuts: list[int]) -> None:
    """Two after one another, as each format has them, whole and one character at a time."""
    format_ = FORMATS[name]
    text = format_.start + inside + format_.end
    expected = [Delta("call", '{"a":1}', "f"), Delta("call", '{"b":"}"}', "g")]
    markers = Markers(calls=format_)
    assert split(text, cuts, markers, schemas=TYPED) == ("", "", expected)
    splitter = MarkerSplitter(markers, calls=True, schemas=TYPED)
    told = [delta.kind for character in text for delta in splitter.feed(character)]
    assert told.index("call_start") < told.index("call_text")
    assert "call" not in told


@settings(max_examples=25)
@given(CUTS)
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("<arg_key>a</arg_key><arg_value>1</arg_value>", {"a": 1}),
        ("\n<arg_key>b</arg_key>\n<arg_value>\ntwo\n\nlines </arg_v\n</arg_value>\n", {"b": "two\n\nlines </arg_v"}),
        ("<arg_key>c</arg_key><arg_value>null</arg_value>", {"c": None}),
        ("<arg_key>c</arg_key><arg_value>nullify</arg_value>", {"c": "nullify"}),
        ("<arg_key>d</arg_key><arg_value>[1, 2]</arg_value>", {"d": [1, 2]}),
        ('<arg_key>b</arg_key><arg_value>a "quote"</arg_value><arg_key>e</arg_key><arg_value>x</arg_value>',
         {"b": 'a "quote"', "e": "x"}),
        ('<arg_key>l</arg_key><arg_value>["</arg_value>", {"a": 1}]</arg_value>', {"l": ["</arg_value>", {"a": 1}]}),
        ("", {}),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_text_between_tags_is_told_by_its_schema(
    arguments: str, meant: dict[str, object], cuts: list[int]
) -> None:
    """Values have the types of the schema, wherever the text is cut."""
    known = {**TYPED["f"]["properties"], **TYPED["g"]["properties"], "l": {"type": "array"}}
    schemas = {"f": {"properties": known}}
    format_ = FORMATS["glm47"]
    text = f"<tool_call>f{arguments}</tool_call>"
    (call,) = split(text, cuts, Markers(calls=format_), schemas=schemas)[2]
    assert (call.kind, call.name, json.loads(call.text)) == ("call", "f", meant)


@settings(max_examples=25)
@given(CUTS)
@pytest.mark.parametrize(
    ("name", "inside", "meant"),
    [
        ("seed_oss", "<function=f><parameter=b>line\n</parameter></function>", "line\n"),
        ("seed_oss", "<function=f><parameter=b>\nline\n</parameter></function>", "line"),
        ("minimax_m2", '<invoke name="f"><parameter name="b">line\n</parameter></invoke>', "line\n"),
        ("glm47", "f<arg_key>b</arg_key><arg_value>line\n</arg_value>", "line\n"),
        ("qwen3_coder", "<function=f><parameter=b>\nline\n\n</parameter></function>", "line\n"),
        ("qwen3_coder", "<function=f><parameter=b>line\n</parameter></function>", "line"),
        ("minicpm5", '"f"><param name="b"><![CDATA[a < b\n]]></param>', "a < b\n"),
        ("minicpm5", '"f"><param name="b"></param>', ""),
    ],
)
def test_the_line_break_at_the_end_of_a_file_is_kept(
    name: str, inside: str, meant: str, cuts: list[int]
) -> None:
    """It is the value's, except where the format has one around each value."""
    format_ = FORMATS[name]
    schemas = {"f": {"properties": {"b": {"type": "string"}}}}
    text = format_.start + inside + format_.end
    (call,) = split(text, cuts, Markers(calls=format_), schemas=schemas)[2]
    assert (call.kind, json.loads(call.text)) == ("call", {"b": meant})


def test_a_text_between_tags_comes_while_it_is_written() -> None:
    """A file that a coding agent writes, in the format of its model; cut off, it is told as far as it came."""
    schemas = {"write": {"properties": {"text": {"type": "string"}}}}
    splitter = MarkerSplitter(Markers(calls=FORMATS["qwen3_coder"]), calls=True, schemas=schemas)
    text = "<tool_call>\n<function=write>\n<parameter=text>\n" + "line\n" * 100
    pieces = [delta for character in text for delta in splitter.feed(character)] + splitter.finish()
    assert sum(delta.kind == "call_text" for delta in pieces) > 400
    (call,) = joined_calls(pieces)
    assert call.kind == "call_start"
    assert call.text == '{"text":"' + "line\\n" * 99 + "line"


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
    assert joined_calls(deltas) == [Delta("call", '{"a":1}', "add")]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>final<|message|>Hello", "Hello"),
        ("Hello, plain", "Hello, plain"),
        ("<|channel|>commentary to=functions.add<|message|>broken", "broken"),
        ("<|channel|>analysis<|mess", ""),
    ],
)
def test_gpt_oss_text_that_is_cut_short_is_content(text: str, content: str) -> None:
    """What no channel claims, and a call that is none, is content; a header is never shown."""
    splitter = HarmonySplitter(calls=True)
    deltas = splitter.feed(text) + splitter.finish()
    assert "".join(delta.text for delta in deltas) == content
    assert all(delta.kind == "content" for delta in deltas)


MUSE = (
    " to=self<|message|>hm < |<|eom|><|start|>assistant<|message|>Let me see.<|eom|>"
    "<|start|>assistant to=add<|message|>"
    '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)


@given(CUTS)
def test_addresses_of_muse_come_apart(cuts: list[int]) -> None:
    """To itself is reasoning, to a function is a call, and the rest is content."""
    markers = find_markers({"tool_parser": "muse_spark"}, "to=self <atem:function_calls> <tool_call>")
    schemas = {"add": {"properties": {"a": {"type": "integer"}}}}
    splitter = make_splitter(markers, reasoning_open=False, tools=schemas)
    assert splitter is not None
    places = sorted({0, len(MUSE), *(cut % len(MUSE) for cut in cuts)})
    deltas = [d for start, end in itertools.pairwise(places) for d in splitter.feed(MUSE[start:end])]
    deltas += splitter.finish()
    assert "".join(d.text for d in deltas if d.kind == "reasoning") == "hm < |"
    assert "".join(d.text for d in deltas if d.kind == "content") == "Let me see."
    assert joined_calls(deltas) == [Delta("call", '{"a":1}', "add")]
    assert splitter.saw_call
    assert not splitter.in_reasoning


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|message|>Hello", "Hello"),
        ("Hello, plain", "Hello, plain"),
        (" to=add<|message|>broken", "broken"),
        (" to=add<|mess", ""),
    ],
)
def test_muse_text_that_is_cut_short_is_content(text: str, content: str) -> None:
    """A header is never shown, and what is no call is content."""
    nothing: dict[str, dict[str, object]] = {}
    for tools in (nothing, {"add": nothing}):
        splitter = make_splitter(
            find_markers({}, "to=self <atem:function_calls>"), reasoning_open=False, tools=tools
        )
        assert splitter is not None
        deltas = splitter.feed(text) + splitter.finish()
        assert "".join(delta.text for delta in deltas) == content
