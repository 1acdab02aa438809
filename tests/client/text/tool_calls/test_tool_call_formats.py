"""How each model family writes calls, read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine_client.text.tool_calls import FORMATS, Markers, MarkerSplitter, ParsedCall, find_markers
from zmqengine_client.text.tool_calls.call_format import Schemas
from zmqengine_client.text.tool_calls.lenient_json import Malformed, read_whole
from zmqengine_client.text.tool_calls.nested_tags import parse_nested

WEATHER = ParsedCall("get_weather", {"city": "Łódź", "days": 3})
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    }
}
BAR, GAP = "\uff5c", "\u2581"
MARK = "]<]minimax[>["
WRITTEN = [
    ("json_tools", '\n{"name": "get_weather", "arguments": {"city": "Łódź", "days": 3}}\n'),
    ("json_tools", '{"name": "get_weather", "arguments": "{\\"city\\": \\"Łódź\\", \\"days\\": 3}"}'),
    (
        "json_tools",
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Łódź", "days": 3}}}',
    ),
    ("json_tools", "{'name': 'get_weather', 'arguments': {'city': 'Łódź', 'days': 3,}}"),
    (
        "qwen3_coder",
        "\n<function=get_weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n",
    ),
    (
        "minimax_m2",
        '\n<invoke name="get_weather">\n<parameter name="city">Łódź</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n',
    ),
    ("mistral", '[{"name": "get_weather", "arguments": {"city": "Łódź", "days": 3}}]'),
    ("mistral", 'get_weather[ARGS]{"city": "Łódź", "days": 3}'),
    ("mistral", 'get_weather{"city": "Łódź", "days": 3}'),
    ("mistral", 'get_weather[CALL_ID]abc123[ARGS]{"city": "Łódź", "days": 3}'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Łódź", "days": 3}}'),
    (
        "glm47",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value>\n",
    ),
    ("json_list", '[{"name": "get_weather", "arguments": {"city": "Łódź", "days": 3}, "id": "call1"}]'),
    (
        "cohere",
        '[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Łódź", "days": 3}}\n]',
    ),
    ("apertus", '[{"get_weather": {"city": "Łódź", "days": 3}}]'),
    ("llama4_json", '<|python_end|>{"name": "get_weather", "parameters": {"city": "Łódź", "days": 3}}'),
    (
        "llama4_json",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Łódź", "days": 3}}<|python_end|>',
    ),
    (
        "seed_oss",
        "\n<function=get_weather>\n<parameter=city>Łódź</parameter>\n<parameter=days>3</parameter>\n</function>\n",
    ),
    (
        "deepseek_v32",
        f'\n<{BAR}DSML{BAR}invoke name="get_weather">\n<{BAR}DSML{BAR}parameter name="city" string="true">Łódź'
        f'</{BAR}DSML{BAR}parameter>\n<{BAR}DSML{BAR}parameter name="days" string="false">3'
        f"</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>\n",
    ),
    (
        "muse_spark",
        '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Łódź</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n',
    ),
    ("minicpm5", '"get_weather"><param name="city"><![CDATA[Łódź]]></param><param name="days">3</param>'),
    (
        "minimax_m3",
        f'\n{MARK}<invoke name="get_weather">{MARK}<city>Łódź{MARK}</city>{MARK}<days>3{MARK}</days>{MARK}</invoke>\n',
    ),
    (
        "kimi_k3",
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Łódź'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|>",
    ),
    ("olmo3", 'get_weather(city="Łódź", days=3)'),
    ("functionary", 'get_weather>{"city": "Łódź", "days": 3}'),
    (
        "solar_open",
        "<|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>"
        '{"city": "Łódź", "days": 3}<|tool_call:end|>',
    ),
    (
        "hunyuan_v3",
        "\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Łódź</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n",
    ),
    ("gemma4", 'call:get_weather{city:<|"|>Łódź<|"|>,days:3}'),
    ("gemma4", "call:get_weather{'city': 'Łódź', 'days': 3}"),
    ("function_gemma", "call:get_weather{city:<escape>Łódź<escape>,days:3}"),
    ("pythonic", "[get_weather(city='Łódź', days=3)]"),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Łódź", "days": 3}<|tool_call_end|>',
    ),
    (
        "deepseek_v3",
        f"<{BAR}tool{GAP}call{GAP}begin{BAR}>function<{BAR}tool{GAP}sep{BAR}>get_weather\n"
        f'```json\n{{"city": "Łódź", "days": 3}}\n```<{BAR}tool{GAP}call{GAP}end{BAR}>',
    ),
    (
        "deepseek_v3",
        f"<{BAR}tool{GAP}call{GAP}begin{BAR}>get_weather<{BAR}tool{GAP}sep{BAR}>"
        f'{{"city": "Łódź", "days": 3}}<{BAR}tool{GAP}call{GAP}end{BAR}>',
    ),
]


def calls_in(name: str, text: str, schemas: Schemas) -> tuple[list[ParsedCall], str]:
    """The calls between the markers of a format, whole, and the content of the output."""
    format_ = FORMATS[name]
    splitter = MarkerSplitter(Markers(calls=format_), calls=True, schemas=schemas)
    deltas = splitter.feed(format_.start + text + format_.end) + splitter.finish()
    calls, content = [], ""
    name = arguments = ""
    for kind, piece, called in deltas:
        if kind == "content":
            content += piece
        elif kind == "call_start":
            name, arguments = called, ""
        elif kind == "call_text":
            arguments += piece
        elif kind == "call":
            calls.append(ParsedCall(called, json.loads(piece)))
        elif not splitter.incomplete_call:
            calls.append(ParsedCall(name, json.loads(arguments)))
    return calls, content


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_is_read_in_each_format(name: str, text: str) -> None:
    """Name and typed arguments come out, whatever the family writes around them.

    vllm-mlx #479: Gemma 4 quantised models emit tool arguments in single quotes.
    """
    assert calls_in(name, text, SCHEMAS) == ([WEATHER], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", '{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}'),
        ("mistral", "a[ARGS]{}b[ARGS]{}"),
        ("mistral", "a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"),
        ("pythonic", "[a(), b()]"),
        ("olmo3", "\na()\nb()\n"),
        ("json_list", '\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}\n'),
        ("apertus", '[{"a": {}}, {"b": {}}]'),
        ("minimax_m3", "".join(f"{MARK}<invoke name={name}>{MARK}</invoke>\n" for name in "ab")),
        ("gemma4", "call:a{}call:b{}"),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
    ],
)
def test_several_calls_are_read_in_order(name: str, text: str) -> None:
    """Calls that come together are all there."""
    assert calls_in(name, text, {}) == ([ParsedCall("a", {}), ParsedCall("b", {})], "")


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=st.text(max_size=200) | st.text(alphabet="{}[]()<>\"':,=|a1 \\", max_size=60))
def test_any_text_is_calls_or_content(name: str, text: str) -> None:
    """mlx-lm #1441: one malformed tool call killed the stream; here nothing is ever raised."""
    calls, _ = calls_in(name, text, SCHEMAS)
    assert all(json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments for call in calls)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
def test_the_lenient_reader_reads_json_and_python(value: object) -> None:
    """It agrees with the strict readers on what they write, but for characters that JSON cannot hold whole."""
    assert read_whole(json.dumps(value)) == value
    assert read_whole(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": ',
        '{"a": 1',
        '{"a" 1}',
        "[1, 2",
        '"open',
        "{a: b}",
        "nan",
        "1e999",
        "[" * 1000 + "]" * 1000,
        "1 2",
    ],
)
def test_the_lenient_reader_never_guesses(text: str) -> None:
    """A value that is cut short or no value is Malformed, never repaired into another one."""
    with pytest.raises(Malformed):
        read_whole(text)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{{ tool_call | tojson }}", "json_tools"),
        ("... <tool_call>\n<function=", "qwen3_coder"),
        ("... [TOOL_CALLS]", "mistral"),
        ("... <|python_tag|> ... tools", "llama3_json"),
        ("... <|tool_call>call: ... <tool_call|>", "gemma4"),
        ("... <tool_call>{name}<arg_key>", "glm47"),
        ("... <seed:tool_call>\n<function=", "seed_oss"),
        (f"set dsml = '{BAR}DSML{BAR}' ... '<' + dsml + 'function_calls>'", "deepseek_v32"),
        (f"set dsml = '{BAR}DSML{BAR}' ... '<' + dsml + 'tool_calls>'", "deepseek_v4"),
        ("... <|START_ACTION|>", "cohere"),
        ("... <|tools_prefix|>", "apertus"),
        ("... <|tool_call|>[{", "granite"),
        ("... <|tool|>tools<|/tool|>", "phi4_mini"),
        ("... <TOOLCALL>", "nemotron"),
        ("... <functions> ... <function_calls>", "olmo3"),
        ("... <tool_calls>[{{ call }}]</tool_calls>", "json_list"),
        ("... <|action_start|><|plugin|>", "internlm2"),
        ("... <|tool_calls|><|tool_call:begin|>", "solar_open"),
        ("{% set suffix = ':opensource' %} ... '<tool_sep{}>'.format(suffix)", "hunyuan_v3"),
        ("... <function={{ name }}> ... <|python_tag|>", "functionary"),
        ("... <|function_call|>", "gigachat3"),
        ("... <|python_start|> ... tools", "llama4_json"),
        ('... <function name="f"><param name="a">', "minicpm5"),
        ("... set ns = ']<]minimax[>[' ... <tool_call>", "minimax_m3"),
        ("... <|open|> ... <|close|> ... <|sep|> ... <tool_call>", "kimi_k3"),
    ],
)
def test_the_format_is_read_off_the_chat_template(template: str, name: str) -> None:
    """Without facts from the worker the template tells."""
    assert find_markers({}, template).calls == FORMATS[name]


def test_facts_win_over_the_template() -> None:
    """The worker's own word counts more than a sign in the template."""
    facts = {"tool_parser": "pythonic", "think_start": "<t>", "think_end": "</t>"}
    markers = find_markers(facts, "<tool_call> <think> </think>")
    assert (markers.think_start, markers.think_end) == ("<t>", "</t>")
    assert markers.calls == FORMATS["pythonic"]


def test_a_general_fact_yields_to_a_format_of_the_templates_own() -> None:
    """A worker calls all that has `<tool_call>` in its template JSON between tags."""
    facts = {"tool_parser": "json_tools", "tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    assert find_markers(facts, "]<]minimax[>[ <tool_call> tool_call.name").calls == FORMATS["minimax_m3"]
    assert find_markers(facts, "nothing of its own").calls == FORMATS["json_tools"]


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        ("... <think> ... </think>", "<think>", "</think>"),
        ("<seed:think> </seed:think>", "<seed:think>", "</seed:think>"),
        ("<mm:think> </mm:think>", "<mm:think>", "</mm:think>"),
        ("[THINK] ... [/THINK]", "[THINK]", "[/THINK]"),
        ("<|START_THINKING|> <|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|inner_prefix|> <|inner_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ("<|think|> <|tool_call:begin|>", "<|think|>", "<|end|>"),
        ("':opensource' '<think{}>'", "<think:opensource>", "</think:opensource>"),
        ("<|open|> <|close|> <|sep|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        # It takes the marker of others out of what users paste.
        ("<|channel>thought <channel|> split('</think>')", "<|channel>thought", "<channel|>"),
    ],
)
def test_the_markers_of_reasoning_are_read_off_the_chat_template(template: str, start: str, end: str) -> None:
    """Each family has its own."""
    assert find_markers({}, template)[:2] == (start, end)


def test_nested_tags_are_objects_and_lists() -> None:
    """By their schema where there is one, and by their names where there is none."""
    schemas: Schemas = {
        "f": {"properties": {"n": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"}}}
    }

    def tag(name: str, inside: str) -> str:
        return f"{MARK}<{name}>{inside}{MARK}</{name}>"

    numbers = tag("n", tag("item", "1"))
    inside = numbers + tag("o", tag("a", "x < y\n") + tag("l", tag("item", "1") + tag("item", tag("b", ""))))
    text = f'{MARK}<invoke name="f">{inside}{MARK}</invoke>'
    arguments: dict[str, object] = {"n": [1], "o": {"a": "x < y\n", "l": ["1", {"b": ""}]}}
    assert calls_in("minimax_m3", text, schemas) == ([ParsedCall("f", arguments)], "")
    for broken in (text[:-3], text.replace("</o>", "</p>"), text + numbers):
        with pytest.raises(Malformed):
            parse_nested(broken, schemas)


# A line break at either end of a value belongs to its tags in some families.
TEXT = st.text(max_size=9).map(str.strip).filter(lambda text: "<|" not in text)
KINDS = {str: "string", bool: "boolean", int: "integer", type(None): "null", list: "array", dict: "object"}


@pytest.mark.parametrize("name", sorted(name for name, found in FORMATS.items() if found.layouts))
@given(
    st.dictionaries(
        st.from_regex("[a-z]{1,5}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | TEXT,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_what_is_written_in_a_format_is_read_back(name: str, arguments: dict[str, object]) -> None:
    """Calls that a template has no place for are in the content, as the model would have written them."""
    format_ = FORMATS[name]
    types = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    calls = [ParsedCall("f", arguments), ParsedCall("g", {})]
    splitter = MarkerSplitter(
        Markers(calls=format_), calls=True, schemas={"f": {"properties": types}, "g": {}}
    )
    deltas = splitter.feed(format_.write(calls)) + splitter.finish()
    assert not [delta for delta in deltas if delta.kind == "content"]
    told = "".join(delta.text if delta.kind != "call_end" else "\n" for delta in deltas)
    assert [json.loads(line) for line in told.strip("\n").split("\n")] == [arguments, {}]
