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


_JSON = '{"name": "look_up", "arguments": {"word": "a b"}}'
_F = '{"name": "f", "arguments": {}}'
_BEGIN, _SEP, _END = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("call\u2581begin", "sep", "call\u2581end")
)
_DSML = "\uff5cDSML\uff5c"
HABITS = [
    ("json_tools", f"<tool_call>\n{_JSON}\n<tool_call>\n{_F}\n</tool_call>"),
    ("json_tools", f"<tool_call>\n{_JSON}\n{_F}\n</tool_call>"),
    ("json_tools", f"<tool_call>[{_JSON}, {_F}]</tool_call>"),
    ("json_tools", f"<tool_call>\n```json\n{_JSON}\n```\n</tool_call><tool_call>```\n{_F}```</tool_call>"),
    ("json_tools", f'<tool_call>{_JSON}}}</tool_call><tool_call>{{"name": "f", "arguments": ""}}</tool_call>'),
    ("json_tools", f'<tool_call>{_JSON}</tool_call><tool_call>{{"name": "f", "arguments": null}}</tool_call>'),
    ("json_tools", f"<tool_call>\r\n{_JSON}\r\n</tool_call>\r\n<tool_call>\r\n{_F}\r\n"),
    ("json_tools", f'<tool_call>{_JSON.replace("look", "functions.look")}</tool_call><tool_call>{_F}</tool_call>'),
    ("glm47", "<tool_call>functions.look_up\n<arg_key>word</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>"
              "<tool_call>f</tool_call>"),
    ("granite", f"<tool_call>[{_JSON}, {_F}]"),
    ("granite", f"<|tool_call|> [{_JSON}, {_F}]"),
    ("phi4_mini", f"functools[{_JSON}, {_F}]"),
    ("mistral", '[TOOL_CALLS]look_up[ARGS]{"word": "a b"}f[ARGS]{}'),
    ("mistral", f"[TOOL_CALLS] {_JSON}, {_F}"),
    ("llama3_json", '<function=look_up>{"word": "a b"}</function><function=f>{}</function>'),
    ("llama3_json", '<function=look_up{"word": "a b"}</function><function=f{}</function>'),
    ("llama3_json", '<|python_tag|>look_up.call(word="a b"); f.call()'),
    ("llama3_json", '{"type": "function", "function": "look_up", "parameters": {"word": "a b"}}; ' + _F),
    ("llama4_json", "<|python_start|>[look_up(word='a b'), f()]<|python_end|>"),
    ("llama4_json", f"<|python_start|>{_JSON}; {_F}<|python_end|>"),
    ("pythonic", f"<|tool_call_start|>[{_JSON}, {_F}]<|tool_call_end|>"),
    ("pythonic", '<|tool_call_start|>[look_up("a b"), f()]<|tool_call_end|>'),
    ("pythonic", '<|tool_call_start|>[look_up({"word": "a b"}), f({})]<|tool_call_end|>'),
    ("pythonic", '<|tool_call_start|>look_up(word="""a b"""), f()<|tool_call_end|>'),
    ("olmo3", '<function_calls>look_up("a b")\nf()</function_calls>'),
    ("qwen3_coder", "<tool_call>\n  <function= look_up >\n    <parameter= word >\na b\n    </parameter>\n"
                    '  </function>\n</tool_call>\n<tool_call>\n<function name="f">\n</function>\n</tool_call>'),
    ("deepseek_v3", f'{_BEGIN}function{_SEP}look_up\n{{"word": "a b"}}{_END}{_BEGIN}function{_SEP}f\n{{}}{_END}'),
    ("kimi_k2", '<|tool_call_begin|>look_up:0<|tool_call_argument_begin|>{"word": "a b"}<|tool_call_end|>'
                "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("json_tools", '<tool_call>{"name": "look_up", "args": {"word": "a b"}}</tool_call><tool_call>{"name": " f "}'
                   "</tool_call>"),
    ("json_tools", f'<tool_call>{{"name": "look_up", "word": "a b"}}</tool_call><tool_call>{_F}</tool_call>'),
    ("json_tools", f'<tool_call>{_JSON[:-1]}, "explanation": "why", }}</tool_call><tool_call>{_F}</tool_call>'),
    ("llama3_json", f"[{_JSON}, {_F}]"),
    ("llama3_json", f"[\n{_JSON},\n{_F}\n]"),
    ("llama4_json", "[look_up(word='a b'), f()]"),
    ("pythonic", "[look_up(word='a b'), f()]"),
    ("olmo3", f"<function_calls>{_JSON}\n{_F}</function_calls>"),
    ("apertus", '<|tools_prefix|>[{"look_up": {"word": "a b"}, "f": {}}]<|tools_suffix|>'),
    ("internlm2", f"<|action_start|> <|plugin|>\n{_JSON}<|action_end|>\n<|action_start|> <|plugin|>\n{_F}"),
    ("functionary", '<function=look_up>\n{"word": "a b"}\n</function><function=f></function>'),
    ("solar_open", '<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>look_up<|tool_call:args|>{"word": "a b"}'
                   "<|tool_call:end|><|tool_call:begin|>y<|tool_call:name|>f<|tool_call:args|><|tool_call:end|><|calls|>"),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>'
                '{"word": "a b"}<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|><|tool_call_end|>'
                "<|tool_calls_section_end|>"),
    ("deepseek_v3", f'{_BEGIN}look_up{_SEP}{{"word": "a b"}}{_BEGIN}f{_SEP}{{}}{_END}'),
    ("deepseek_v3", f'{_BEGIN}tool{_SEP}look_up\n```json\n{{"word": "a b"}}\n```{_END}{_BEGIN}tool{_SEP}f\n{_END}'),
    ("deepseek_v3", f'{_BEGIN}look_up{_SEP}```json\n{{"word": "a b"}}\n```{_END}{_BEGIN}f{_SEP}```json\n{{}}\n```'),
    ("glm47", '<tool_call>look_up\n{"word": "a b"}\n</tool_call><tool_call>f{}</tool_call>'),
    ("glm47", "<tool_call>look_up\n<arg_key>word</arg_key></arg_key>\n<arg_value>a b</arg_value>\n</tool_call>"
              "<tool_call>f</tool_call>"),
    ("minicpm5", '<function name="look_up"><param name="word">a b</param>\n<function name="f"></function>'),
    ("hunyuan_v3", "<tool_calls>\n<tool_call>look_up<tool_sep>\n<arg_key>word\n<arg_value>a b</arg_value>\n</tool_call>"
                   "<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>"),
    ("glm47", "<tool_call>look_up\n<arg_key>word<arg_value>a b</arg_value>\n<tool_call>f\n</tool_call>"),
    ("qwen3_coder", '<tool_call>\n<function=look_up>\n{"word": "a b"}\n</function>\n</tool_call>\n<tool_call>\n'
                    "<function=f/>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=look_up>\n<word>\na b\n</word>\n</function>\n<function=f>\n</function>\n"
                    "</tool_call>"),
    ("seed_oss", f"<seed:tool_call>\n{_JSON}\n</seed:tool_call><seed:tool_call>\n{_F}\n</seed:tool_call>"),
    ("minimax_m2", f"<minimax:tool_call>\n{_JSON}\n{_F}\n</minimax:tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="word">a b</parameter>\n'
                   '<invoke name="f">\n</minimax:tool_call>'),
    ("deepseek_v32", f'<{_DSML}function_calls>\n<{_DSML}invoke name="look_up">\n<{_DSML}parameter string="true" '
                     f'name="word">a b</{_DSML}parameter>\n<{_DSML}invoke name="f"/>\n</{_DSML}function_calls>'),
    ("deepseek_v4", f'<{_DSML}tool_calls>\n<{_DSML}invoke name="look_up">\n{{"word": "a b"}}\n</{_DSML}invoke>\n'
                    f'<{_DSML}invoke name="f">\n</{_DSML}invoke>\n</{_DSML}tool_calls>'),
    ("harmony", '<|channel|>commentary to=functions.look_up json<|message|>```json\n{"word": "a b"}\n```<|call|>'
                "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), HABITS)
def test_what_models_are_used_to_write_are_calls(name: str, text: str) -> None:
    """Their own older formats, fences, namespaces, arguments by position, and ends that are missing or too many."""
    seen = told(name, text)
    assert seen.calls == [("look_up", '{"word":"a b"}', True), ("f", "{}", True)]
    assert (seen.content.strip(), seen.incomplete) == ("", False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", '<tool_call>look_up\n{"word": "a b"}\n</tool_call>'),
        ("json_tools", '<tool_call>look_up(word="a b")</tool_call>'),
        ("json_tools", '<tool_call>{"look_up": {"word": "a b"}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "look_up" "arguments": {"word": "a b"}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "look_up", "arguments": [{"word": "a b"}]}</tool_call>'),
        (
            "longcat",
            "<longcat_tool_call>look_up\n<longcat_arg_key>word</longcat_arg_key></longcat_tool_call>",
        ),
        ("qwen3_coder", "<tool_call>\nlook_up\n<parameter=word>\na b\n</parameter>\n</tool_call>"),
        ("glm47", '<tool_call>look_up(word="a b")</tool_call>'),
        ("gemma4", '<|tool_call>look_up{word:<|"|>a b<|"|>}<tool_call|>'),
        ("gemma4", '<|tool_call>call: look_up {word:<|"|>a b<|"|>}<tool_call|>'),
        ("gemma4", '<|tool_call>call:look_up(word=<|"|>a b<|"|>)<tool_call|>'),
    ],
)
def test_what_is_in_another_families_format_is_text(name: str, text: str) -> None:
    """All of it: a client sees what came instead of a call."""
    assert (told(name, text).content, told(name, text).calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:look_up{word:a b}<tool_call|>"),
        ("pythonic", '<|tool_call_start|>[look_up(**{"word": "a b"})]<|tool_call_end|>'),
        ("pythonic", '<|tool_call_start|>[look_up(word="a " "b")]<|tool_call_end|>'),
        ("json_tools", f"<tool_call>{_JSON} and more</tool_call>"),
        ("json_list", f"<tool_calls>[{_JSON}]\n[{_F}]</tool_calls>"),
        ("qwen3_coder", "<tool_call>\n<function=f><function=f>\n</function>\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        ),
    ],
)
def test_what_has_no_one_reading_is_told_as_cut(name: str, text: str) -> None:
    """A call whose arguments broke off, or with text behind it, is not said to be whole."""
    assert told(name, text).incomplete


def test_a_python_call_of_more_than_the_tool_takes_is_told_as_cut() -> None:
    """No name is made up for an argument."""
    assert told("pythonic", '<|tool_call_start|>[f("x")]<|tool_call_end|>').incomplete


def test_a_second_marker_of_reasoning_behind_the_prompts_is_dropped() -> None:
    """Models that learnt to write it do so where the template has opened the reasoning."""
    seen = told("json_tools", "<think>\nplan</think>\n\nDone.", thinking=True)
    assert (seen.reasoning, seen.content) == ("plan", "Done.")
    seen = told("json_tools", "I write <think> now</think>Done.", thinking=True)
    assert (seen.reasoning, seen.content) == ("I write <think> now", "Done.")


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
    for seed in range(12):
        chance = random.Random(f"{name}{seed}")
        cut = chance.randrange(len(whole))
        parts = [*[whole] * 4, whole.removeprefix(format_.start), whole[:cut], whole[cut:]]
        pieces = [*plain, *filter(None, marks * 2), *parts]
        told(name, "".join(chance.choices(pieces, k=chance.randrange(1, 14))), thinking=chance.random() < 0.4)
