"""Formats with JSON arguments: a call is one JSON object, or a name between markers followed by an object."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zmqengine_client.text.tool_calls.call_format import (
    CallFormat,
    ParsedCall,
    Schemas,
    as_arguments,
    nonempty,
    skip,
)
from zmqengine_client.text.tool_calls.call_layout import CallLayout
from zmqengine_client.text.tool_calls.json_arguments import ArgumentsParser, JsonArguments
from zmqengine_client.text.tool_calls.lenient_json import Malformed, read_value, read_whole
from zmqengine_client.text.tool_calls.schema_types import property_names

# DeepSeek's markers contain a fullwidth bar, and a lower block for a space.
BAR, GAP = "\uff5c", "\u2581"
_BETWEEN = " \t\r\n;,"
_CALL_MEMBERS = ("name", "tool_name", "function", "id", "tool_call_id", "type", "index")


def parse_json(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `{"name": ..., "arguments": {...}}`: one, a list, or several in a row, with or without `;`
    between."""
    return nonempty([_json_call(item, schemas) for item in _values(text)])


def _values(text: str) -> list[object]:
    """The JSON values in a text, with lists flattened."""
    values: list[object] = []
    at = 0
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    while (at := skip(text, at, _BETWEEN)) < len(text):
        value, at = read_value(text, at)
        values += value if isinstance(value, list) else [value]
    return values


def _json_call(value: object, schemas: Schemas) -> ParsedCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    names = [value.get(each) for each in ("name", "tool_name", "function")] if isinstance(value, dict) else []
    name = next((each for each in names if each), None)
    if not isinstance(value, dict) or not isinstance(name, str):
        raise Malformed("a call is an object with a name")
    arguments = value.get(
        "arguments", value.get("parameters", _unnamed(value, schemas.get(name.strip(), {})))
    )
    if isinstance(arguments, str):
        arguments = read_whole(arguments) if arguments.strip() else None
    return ParsedCall(name, as_arguments(arguments))


def _unnamed(value: Mapping[str, object], parameters: Mapping[str, object]) -> object:
    """Arguments under another name, or beside the function's; none if nothing else is there."""
    rest = {key: part for key, part in value.items() if key not in _CALL_MEMBERS}
    objects = [part for part in rest.values() if isinstance(part, dict)]
    if rest and rest.keys() <= set(property_names(parameters)):
        return rest
    return objects[0] if len(objects) == 1 else {}


def parse_llama4(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse JSON calls before or after Llama 4's end-of-Python marker."""
    return parse_json(text.replace("<|python_end|>", " "), schemas)


def _read_optional(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    """Make a parser of an object that may be left out before a marker."""
    return JsonArguments(optional=True)


def read_python(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    """Make a parser of the arguments of a Python call, or of an object."""
    return JsonArguments(keywords=True, positions=property_names(parameters))


# A single call, or the next one of a list.
_JSON_CALL = (
    r'(?:\[\s*)?\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"\\]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# A few other members may follow: ids, explanations.
_JSON_TAIL = r'(?:\s*,\s*"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)){0,4}(?:\s*,)?\s*\}[\s}]*(?:```)?'
_PYTHON_CALL = r"(?:\[\s*)?([A-Za-z_][\w.]*)\s*\("
# Llama 3.1 writes this beside its template, and leaves out the bracket.
_TAGGED_CALL = r"([\w.-]+)[\s>]*(?=\{)"
_LLAMA3_HEADER = re.compile(rf"\s*(?:{_JSON_CALL}|{_TAGGED_CALL}|([A-Za-z_]\w*)\.call\()")
PYTHON_HEADER = re.compile(r"\s*" + _PYTHON_CALL)
# LFM2 writes JSON where its system prompt asks for it.
EITHER_HEADER = re.compile(rf"\s*(?:{_JSON_CALL}|{_PYTHON_CALL})")
EITHER_TAIL = re.compile(r"\s*[)}]?")
_JSON_HEADER = re.compile(r"\s*" + _JSON_CALL)
_LLAMA4_HEADER = re.compile(rf"\s*(?:<\|python_end\|>\s*)?(?:{_JSON_CALL}|{_PYTHON_CALL})")
# An object may hold several calls.
_KEYED_HEADER = re.compile(r'\s*(?:\[\s*)?(?:\{\s*)?"([^"\\]+)"\s*:\s*(?=\{)')
# A list of JSON calls, or a name followed by its arguments.
_MISTRAL_START = re.compile(
    r'\s*(?:\[\s*)?\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)|'
    r"\s*(?:\[TOOL_CALLS\]\s*)?([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_MISTRAL_TAIL = re.compile(r'(?:\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\})?')
_KIMI_HEADER = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=[{<])"
)
_KIMI_TAIL = re.compile(r"\s*<\|tool_call_end\|>")
_DEEPSEEK_HEADER = re.compile(
    f"\\s*<{BAR}tool{GAP}call{GAP}begin{BAR}>\\s*(?:(?:function|tool)\\s*<{BAR}tool{GAP}sep{BAR}>\\s*([\\w.-]+)"
    f"|([\\w.-]+)\\s*<{BAR}tool{GAP}sep{BAR}>)\\s*(?:```(?:json)?\\s*)?(?=[{{<])"
)
_DEEPSEEK_TAIL = re.compile(f"\\s*(?:```\\s*)?<{BAR}tool{GAP}call{GAP}end{BAR}>")


_NAMED_HEADER = re.compile(r"([\w.-]+)>\s*(?=\{|</)")
_SOLAR_HEADER = re.compile(
    r"\s*<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>\s*([\w.-]+)\s*<\|tool_call:args\|>\s*(?=[{<])"
)


JSON_SHAPES = ('{"name": "NAME",', '{"tool_name": "NAME",', '{"tool_call_id":')
WHOLE_JSON = ("{", "```{", "```json{")


def _listed(call: str, end: str) -> CallLayout:
    """A bracketed list of calls, on one line or on one line each."""
    return CallLayout(call, before="[«space»", between=",«space»", after=f"«space»]{end}")


_CALL = '{"name": "«name»", "arguments": «arguments»}'
_PARAMETERS = '{"name": "«name»", "parameters": «arguments»}'
_COHERE_CALL = '{"tool_call_id": "«number»", "tool_name": "«name»", "parameters": «arguments»}'


def _json(start: str, end: str, *layouts: CallLayout) -> CallFormat:
    return CallFormat(
        start, end, _JSON_HEADER, re.compile(_JSON_TAIL), parse=parse_json,
        shapes=JSON_SHAPES, wholes=WHOLE_JSON, loose=True, layouts=layouts,
    )  # fmt: skip


def _one_each(start: str, end: str) -> CallFormat:
    """A format in which each call has its own markers, on lines of their own."""
    layout = CallLayout(_CALL, before="\n", between=f"\n{end}\n{start}\n", after=f"\n{end}")
    return _json(start, end, layout)


_KIMI_MARKS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_BEGIN, _END, _SEPARATOR = (
    f"<{BAR}tool{GAP}{word}{BAR}>" for word in (f"call{GAP}begin", f"call{GAP}end", "sep")
)
_DEEPSEEK_END = f"<{BAR}tool{GAP}calls{GAP}end{BAR}>"
_DEEPSEEK_MARKS = (_BEGIN, _END, _SEPARATOR)

JSON_FORMATS: dict[str, CallFormat] = {
    "json_tools": _one_each("<tool_call>", "</tool_call>"),
    # Jamba, Hunyuan A13B, Apriel; MiniMax M1 has each call on a line of its own.
    "json_list": _json(
        "<tool_calls>", "</tool_calls>",
        _listed(_CALL, "</tool_calls>"), CallLayout(_CALL, before="\n", between="\n", after="\n</tool_calls>"),
    ),
    "longcat": _one_each("<longcat_tool_call>", "</longcat_tool_call>"),
    "nemotron": _json("<TOOLCALL>", "</TOOLCALL>", _listed(_CALL, "</TOOLCALL>")),
    "phi4_mini": _json("<|tool_call|>", "<|/tool_call|>", _listed(_CALL, "<|/tool_call|>"))._replace(
        blocks=(("functools", ""),)
    ),
    # Some outputs have the marker as text.
    "granite": _json("<|tool_call|>", "", _listed(_CALL, ""))._replace(blocks=(("<tool_call>", ""),)),
    "internlm2": _json(
        "<|action_start|><|plugin|>", "<|action_end|>",
        CallLayout(_CALL, before="\n", between="<|action_end|><|action_start|><|plugin|>\n", after="<|action_end|>"),
    )._replace(blocks=(("<|action_start|> <|plugin|>", "<|action_end|>"),)),
    "gigachat3": _json("<|function_call|>", "", CallLayout(_CALL, several=False)),
    "cohere": _json("<|START_ACTION|>", "<|END_ACTION|>", _listed(_COHERE_CALL, "<|END_ACTION|>")),
    # Without its marker a call cannot be told from an answer in JSON.
    "apertus": CallFormat(
        "<|tools_prefix|>", "<|tools_suffix|>", _KEYED_HEADER, re.compile(r"\s*\}?"), shapes=('{"NAME": {',),
        layouts=(_listed('{"«name»": «arguments»}', "<|tools_suffix|>"),),
    ),
    "functionary": CallFormat(
        "<function=", "</function>", _NAMED_HEADER, read=_read_optional, shapes=("NAME>{", "NAME></"),
        constrained=False,
        layouts=(CallLayout("«name»>«arguments»", between="</function>\n<function=", after="</function>"),),
    ),
    "solar_open": CallFormat(
        "<|tool_calls|>", "<|calls|>", _SOLAR_HEADER, re.compile(r"\s*<\|tool_call:end\|>"),
        read=_read_optional, shapes=("<|tool_call:begin|>",), opener="<|tool_call:begin|>", constrained=False,
        layouts=(
            CallLayout(
                "<|tool_call:begin|>«number»<|tool_call:name|>«name»<|tool_call:args|>«arguments»<|tool_call:end|>",
                after="<|calls|>",
            ),
        ),
    ),
    "mistral": CallFormat(
        "[TOOL_CALLS]", "", _MISTRAL_START, _MISTRAL_TAIL, parse=parse_json, written_id="{index:09}",
        follows=('{"', "{}", '{ "', "{\n"),
        shapes=("NAME[ARGS]", "NAME[CALL_ID]", "NAME{", *JSON_SHAPES), wholes=WHOLE_JSON, loose=True,
        layouts=(
            CallLayout("«name»[ARGS]«arguments»", between="[TOOL_CALLS]", markers=("[ARGS]",), when="[ARGS]"),
            CallLayout(_CALL, before="[", between=", ", after="]"),
            CallLayout(_CALL, before=" [", between=", ", after="]"),
        ),
    ),
    "llama3_json": CallFormat(
        "<|python_tag|>", "", _LLAMA3_HEADER, re.compile(rf"(?:{_JSON_TAIL})?"), read=read_python, parse=parse_json,
        blocks=(("<function=", "</function>"),), shapes=(*JSON_SHAPES, "NAME>{", "NAME{", "NAME.call("),
        wholes=WHOLE_JSON, bare=True, loose=True, layouts=(CallLayout(_PARAMETERS, between="; "),),
    ),
    "llama4_json": CallFormat(
        "<|python_start|>", "", _LLAMA4_HEADER, re.compile(r"\s*[)}\]]*\s*(?:<\|python_end\|>)?"), read=read_python,
        parse=parse_llama4, bare=True, shapes=(*JSON_SHAPES, "NAME("), wholes=(*WHOLE_JSON, "<|python_end|>"),
        loose=True,
        layouts=(CallLayout(_PARAMETERS),),
    ),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _KIMI_HEADER, _KIMI_TAIL,
        read=_read_optional, written_id="functions.{name}:{index}",
        # Some outputs have the singular.
        blocks=(("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),),
        shapes=tuple(
            f"<|tool_call_begin|>{space}NAME{end}" for space in ("functions.", "") for end in (":", "<|")
        ),
        opener="<|tool_call_begin|>",
        layouts=(
            CallLayout(
                "<|tool_call_begin|>functions.«name»:«number»<|tool_call_argument_begin|>«arguments»<|tool_call_end|>",
                after="<|tool_calls_section_end|>", markers=_KIMI_MARKS,
            ),
        ),
    ),
    "deepseek_v3": CallFormat(
        f"<{BAR}tool{GAP}calls{GAP}begin{BAR}>", _DEEPSEEK_END, _DEEPSEEK_HEADER, _DEEPSEEK_TAIL,
        read=_read_optional,
        shapes=(*(f"{_BEGIN}{kind}{_SEPARATOR}NAME" for kind in ("function", "tool")), f"{_BEGIN}NAME{_SEPARATOR}"),
        opener=_BEGIN,
        layouts=(
            CallLayout(
                f"{_BEGIN}function{_SEPARATOR}«name»\n```json\n«arguments»\n```{_END}",
                between="\n", after=_DEEPSEEK_END, markers=_DEEPSEEK_MARKS, when="```json",
            ),
            CallLayout(
                f"{_BEGIN}«name»{_SEPARATOR}«arguments»{_END}", after=_DEEPSEEK_END, markers=_DEEPSEEK_MARKS
            ),
        ),
    ),
}  # fmt: skip
