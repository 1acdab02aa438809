"""How each model family writes calls, read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine_http.tool_calls import FORMATS, Call, find_markers
from zmqengine_http.tool_calls.lenient import Malformed, read_whole

WEATHER = Call("get_weather", {"city": "Łódź", "days": 3})
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


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_is_read_in_each_format(name: str, text: str) -> None:
    """Name and typed arguments come out, whatever the family writes around them.

    vllm-mlx #479: Gemma 4 quantised models emit tool arguments in single quotes.
    """
    assert FORMATS[name].parse(text, SCHEMAS) == [WEATHER]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", '{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}'),
        ("mistral", "a[ARGS]{}b[ARGS]{}"),
        ("mistral", "a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"),
        ("pythonic", "[a(), b()]"),
        ("gemma4", "call:a{}call:b{}"),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
    ],
)
def test_several_calls_are_read_in_order(name: str, text: str) -> None:
    """Calls that come together are all there."""
    assert FORMATS[name].parse(text, {}) == [Call("a", {}), Call("b", {})]


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=st.text(max_size=200) | st.text(alphabet="{}[]()<>\"':,=|a1 \\", max_size=60))
def test_any_text_is_calls_or_malformed(name: str, text: str) -> None:
    """mlx-lm #1441: one malformed tool call killed the stream; here nothing but Malformed is ever raised."""
    try:
        calls = FORMATS[name].parse(text, SCHEMAS)
    except Malformed:
        return
    assert calls
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
