"""What models write beside their format, tried on every format: a call is found, and what is none stays text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from zmqengine_client.text.tool_calls import (
    FORMATS,
    HarmonySplitter,
    Markers,
    ParsedCall,
    TextSplitter,
    make_splitter,
)

TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "look_up": {"type": "object", "properties": {"word": TEXT, "place": TEXT, "count": {"type": "integer"}}},
    "f": {"type": "object", "properties": {}},
}
CALLS = [ParsedCall("look_up", {"word": "a b", "count": 3}), ParsedCall("f", {})]
THINK = ("<think>", "</think>")
WORDS = "A call of it is a text like any other. " * 6
WRITTEN = sorted(name for name, found in FORMATS.items() if found.layouts)
WITH_OPENER = [name for name in WRITTEN if FORMATS[name].opener or FORMATS[name].loose]
TAGGED = [name for name in WRITTEN if FORMATS[name].layouts[0].argument]
JSON = [
    name for name in WRITTEN if not FORMATS[name].layouts[0].argument and not FORMATS[name].layouts[0].style
]


class Told:
    """An output as it is told: texts by kind, calls, and the longest piece of content."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, splitter: TextSplitter, pieces: list[str]) -> None:
        self.reasoning = self.content = ""
        self.longest = 0
        calls: list[list[Any]] = []
        for piece in [*pieces, None]:
            for delta in splitter.feed(piece) if piece is not None else splitter.finish():
                if delta.kind == "content":
                    self.content += delta.text
                    self.longest = max(self.longest, len(delta.text))
                elif delta.kind == "reasoning":
                    self.reasoning += delta.text
                elif delta.kind in ("call", "call_start"):
                    calls.append([delta.name, delta.text, delta.kind == "call"])
                elif delta.kind == "call_text":
                    calls[-1][1] += delta.text
                else:
                    calls[-1][2] = True
        self.calls = [tuple(call) for call in calls]
        self.incomplete = splitter.incomplete_call

    def __eq__(self, other: object) -> bool:
        mine, others = ({**vars(each), "longest": 0} for each in (self, other))
        return mine == others


def cuts(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for seed in range(3):
        chance, pieces, rest = random.Random(seed), [], text
        while rest:
            length = chance.choice((1, 2, 3, 5, 8, 13))
            pieces.append(rest[:length])
            rest = rest[length:]
        yield pieces


def told(name: str, text: str, *, thinking: bool = False) -> Told:
    """The output, the same however it is cut."""

    def splitter() -> TextSplitter:
        if name == "harmony":
            return HarmonySplitter(calls=True, names=TOOLS)
        found = make_splitter(Markers(*THINK, calls=FORMATS[name]), reasoning_open=thinking, tools=TOOLS)
        assert found
        return found

    each = [Told(splitter(), pieces) for pieces in cuts(text)]
    assert all(one == each[0] for one in each), f"depends on the cuts: {[vars(one) for one in each]}"
    return each[1]


def written(name: str, *calls: ParsedCall) -> str:
    return FORMATS[name].write(calls or CALLS)


def names(seen: Told) -> list[str]:
    assert all(whole for _, _, whole in seen.calls)
    return [name for name, _, _ in seen.calls]


WHOLE = [("look_up", '{"word":"a b","count":3}', True), ("f", "{}", True)]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_formats_own_words_are_calls(name: str) -> None:
    """The control of all that is below."""
    some = WHOLE[:1] if not FORMATS[name].layouts[0].several else WHOLE
    assert told(name, written(name, *CALLS[: len(some)])).calls == some


@pytest.mark.parametrize("name", WITH_OPENER)
def test_a_call_whose_marker_is_left_out_is_a_call(name: str) -> None:
    """Qwen3-Coder leaves it out once in five turns; the marker that closes it is syntax still."""
    text = written(name, CALLS[0]).removeprefix(FORMATS[name].start)
    seen = told(name, f"I'll look.\n{text}")
    assert seen.calls == WHOLE[:1]
    assert (seen.content.strip(), seen.incomplete) == ("I'll look.", False)


@pytest.mark.parametrize("name", WITH_OPENER)
def test_a_call_of_no_offered_tool_is_text_without_its_marker(name: str) -> None:
    """It is prose, or an answer in JSON."""
    text = written(name, ParsedCall("unknown", {"word": "x"})).removeprefix(FORMATS[name].start)
    seen = told(name, f"Like this:\n{text}")
    assert seen.calls == []
    assert "unknown" in seen.content


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_open_thinking_ends_it(name: str) -> None:
    """Qwen 3.5 calls without closing its thinking, and the agent waited for an answer."""
    some = CALLS[: 1 if not FORMATS[name].layouts[0].several else 2]
    seen = told(name, f"I look.\n{written(name, *some)}", thinking=True)
    assert (seen.calls, seen.reasoning.strip(), seen.content.strip()) == (WHOLE[: len(some)], "I look.", "")
    closed = told(name, f"I look.\n{written(name, *some)}\n</think>\n\nDone.", thinking=True)
    if FORMATS[name].end:
        assert (closed.calls, closed.content) == (WHOLE[: len(some)], "Done.")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mention_in_thinking_is_thinking(name: str) -> None:
    """Its words about markers, names of tools among them."""
    format_ = FORMATS[name]
    text = f"Some write {format_.start}, some {format_.opener}look_up or `{format_.start}` {format_.end}. No."
    seen = told(name, f"{text}</think>Done.", thinking=True)
    assert (seen.reasoning, seen.content, seen.calls) == (text, "Done.", [])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mention_in_an_answer_withholds_nothing(name: str) -> None:
    """What can begin no call any more goes on."""
    text = f"The tag `{FORMATS[name].start}` opens a call. {WORDS}"
    seen = told(name, text)
    assert (seen.content, seen.calls) == (text, [])
    assert seen.longest < 50


@pytest.mark.parametrize("name", [name for name in WRITTEN if FORMATS[name].blocks])
def test_a_block_of_another_version_is_a_block(name: str) -> None:
    """DeepSeek V4 writes the name of V3.2's."""
    format_ = FORMATS[name]
    for start, end in format_.blocks:
        inside = written(name).removeprefix(format_.start).removesuffix(format_.end)
        for closing in (end, format_.end):
            seen = told(name, start + inside + closing)
            assert (seen.calls, seen.content, seen.incomplete) == (WHOLE, "", False)


VALUES = [
    "{closing}", "a{closing}b", "<x>{closing}</x>", "{closing}{closing} c", "x <y> z", "a\n{closing}\nb",
    "</tool_call> d", "<tool_call>", "a < b > c", "</function>", "if a </ b", "]]>", "</", "<parameter", "{opening}",
    "x {opening}?",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", TAGGED)
def test_a_value_keeps_the_tags_that_it_holds(name: str, value: str) -> None:
    """XML, build files, and documentation of tools."""
    layout = FORMATS[name].layouts[0]
    if (name, value) == ("minicpm5", "]]>"):
        pytest.skip("closes its CDATA")
    opening = layout.argument.partition("«")[0]
    text = value.replace("{closing}", layout.closing.strip()).replace("{opening}", opening)
    seen = told(name, written(name, ParsedCall("look_up", {"word": text, "place": "there"})))
    assert seen.calls == [("look_up", f'{{"word":{json_text(text)},"place":"there"}}', True)]


def json_text(text: str) -> str:
    return '"' + text.replace("\n", "\\n").replace('"', '\\"') + '"'


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_whose_tag_is_missing_ends_before_the_next(name: str) -> None:
    """Of an argument that the tool has, or of the call."""
    closing = FORMATS[name].layouts[0].closing
    whole = written(name, ParsedCall("look_up", {"word": "Dallas", "place": "TX"}))
    first = whole.replace(closing, "", 1)
    assert told(name, first).calls == [("look_up", '{"word":"Dallas","place":"TX"}', True)]
    head, _, tail = whole.rpartition(closing)
    assert told(name, head + tail).calls == [("look_up", '{"word":"Dallas","place":"TX"}', True)]


def test_a_tag_within_a_line_is_text_where_tags_begin_lines() -> None:
    """Of a tool's own argument too; so is an end of a call that nothing follows."""
    for value in ("use <parameter=place> here", "a\n</function>\nb", "</tool_call>\nx"):
        text = written("qwen3_coder", ParsedCall("look_up", {"word": value}))
        assert told("qwen3_coder", text).calls == [("look_up", f'{{"word":{json_text(value)}}}', True)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", "The <tool_call>\n{...}\n</tool_call> form"),
        ("json_tools", "<tool_call> [see below]"),
        ("json_tools", '{"name": "f", "age": 3}'),
        ("json_tools", 'A call is {"name": "f", "arguments": {}} here.'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "f { brace"),
        ("glm47", "f is a function.\nf <b>bold</b>\nlook_up"),
        ("gemma4", "I will call: f{x} soon, call:me{maybe}"),
        ("pythonic", "[1], [f] and [look_up]"),
        ("qwen3_coder", "<tool_call></tool_call>"),
        ("qwen3_coder", "Use <function=f> in a template, then close it."),
    ],
)
def test_text_that_looks_like_a_call_is_text(name: str, text: str) -> None:
    """Answers about tools, and in the words of one."""
    seen = told(name, text)
    assert (seen.content, seen.calls) == (text, [])


@pytest.mark.parametrize("name", JSON)
def test_an_escape_that_json_does_not_know_keeps_its_backslash(name: str) -> None:
    r"""A search for `d+` is another than one for `\d+`."""
    text = written(name, ParsedCall("look_up", {"word": "\\d+\\.py C:\\Users \\*x\\*"}))
    seen = told(name, text.replace("\\\\", "\\"))
    assert seen.calls == [("look_up", '{"word":"\\\\d+\\\\.py C:\\\\Users \\\\*x\\\\*"}', True)]


@pytest.mark.parametrize("channel", ["commentary", "analysis", "final"])
def test_a_recipient_without_a_namespace_is_a_call_of_an_offered_tool(channel: str) -> None:
    """gpt-oss leaves `functions.` out in long contexts; its own tools are no calls."""
    message = "<|channel|>{} to={} <|constrain|>json<|message|>{{}}<|call|>"
    assert names(told("harmony", message.format(channel, "f"))) == ["f"]
    assert names(told("harmony", message.format(channel, "functions.f"))) == ["f"]
    for other in ("python", "browser.open", "unknown"):
        assert told("harmony", message.format(channel, other)).calls == []


@pytest.mark.parametrize("marker", THINK)
def test_a_mention_of_thinking_in_an_answer_is_text(marker: str) -> None:
    """The rest of the answer is not reasoning."""
    text = f"The `{marker}` tag is used by some. It hides text."
    assert told("json_tools", text).content == text
    assert told("json_tools", f"plan</think>{text}", thinking=True).content == text


def test_code_in_a_fence_is_no_call() -> None:
    """An answer that shows how to call."""
    text = 'Send this:\n```json\n{"name": "f", "arguments": {}}\n```\nDone.'
    assert (told("json_tools", text).content, told("json_tools", text).calls) == (text, [])


@pytest.mark.parametrize("name", WRITTEN)
def test_no_mixture_depends_on_how_it_comes(name: str) -> None:
    """Markers, halves of calls and prose in any order: `told` compares the cuts, and nothing is raised."""
    format_ = FORMATS[name]
    layout, whole = format_.layouts[0], written(name, CALLS[0])
    blocks = [each for pair in format_.blocks for each in pair]
    marks = [format_.start, format_.end, format_.opener, layout.closing, *blocks]
    plain = [*THINK, "\n", " ", "text ", "f", "look_up", *"{}[],\"'`<3", "```\n", "</"]
    for seed in range(25):
        chance = random.Random(f"{name}{seed}")
        cut = chance.randrange(len(whole))
        parts = [*[whole] * 4, whole.removeprefix(format_.start), whole[:cut], whole[cut:]]
        pieces = [*plain, *filter(None, marks * 2), *parts]
        told(name, "".join(chance.choices(pieces, k=chance.randrange(1, 14))), thinking=chance.random() < 0.4)
