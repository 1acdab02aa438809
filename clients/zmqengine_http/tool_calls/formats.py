"""How models write tool calls. A format is where a call starts and ends in the text, and a parser for what is between.

The names are those mlx-lm gives its parsers, which cannot be imported without mlx.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zmqengine_http.tool_calls.lenient import Malformed, read_value, read_whole
from zmqengine_http.tool_calls.streamed import ArgumentsReader, Reader
from zmqengine_http.tool_calls.streamed_text import TaggedArguments
from zmqengine_http.tool_calls.typed import typed

Schemas = Mapping[str, Mapping[str, object]]
"""The `parameters` of each offered function, by name."""


class Call(NamedTuple):
    """A function to call, and with what."""

    name: str
    arguments: dict[str, object]


def _read_json(parameters: Mapping[str, object], end: str) -> Reader:
    return ArgumentsReader()


class Format(NamedTuple):
    """Where calls are in the text. With an empty `end` they go on to the end of the output.

    `parse` gets what is between and the schemas; it raises `Malformed`. `bare`: an output that begins with `{` is a
    call as well, without any marker. Arguments are told while they are written: `header` matches what stands before
    those of a call, with the name as the one group that matched; `read` makes what reads them, from the parameters of
    the function and `end`; `tail` matches what closes the call behind them. `name` is the format's own.
    """

    start: str
    end: str
    parse: Callable[[str, Schemas], list[Call]]
    header: re.Pattern[str]
    tail: re.Pattern[str] = re.compile("")
    read: Callable[[Mapping[str, object], str], Reader] = _read_json
    bare: bool = False
    name: str = ""


def parse_json(text: str, schemas: Schemas) -> list[Call]:
    """`{"name": ..., "arguments": {...}}`, or several, in a list, after one another or separated by `;`."""
    calls: list[Call] = []
    at = 0
    while text[at:].strip(" \t\r\n;,"):
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n;,"))
        value, at = read_value(text, at)
        calls += [_json_call(item) for item in (value if isinstance(value, list) else [value])]
    return _some(calls)


def _json_call(value: object) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Malformed("a call is an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], _object(read_whole(arguments) if isinstance(arguments, str) else arguments))


_MISTRAL_BARE_HEADER = re.compile(r"\s*([\w.-]+)\s*(?=\{)")
_MISTRAL_HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*")


def parse_mistral(text: str, schemas: Schemas) -> list[Call]:
    """A list of JSON calls, or `name[ARGS]{...}` one after another."""
    if text.lstrip().startswith("["):
        return parse_json(text, schemas)
    calls, at = [], 0
    while text[at:].strip():
        at += len("[TOOL_CALLS]") if text.startswith("[TOOL_CALLS]", at) else 0
        header = _MISTRAL_HEADER.match(text, at) or _MISTRAL_BARE_HEADER.match(text, at)
        if not header:
            raise Malformed("no function name")
        arguments, at = read_value(text, header.end())
        calls.append(Call(header[1], _object(arguments)))
    return _some(calls)


_XML_FUNCTION = re.compile(
    r"""<(?:function=|function name=|invoke name=)["']?([^"'>\s]+)["']?\s*>(.*?)</(?:function|invoke)>""",
    re.DOTALL,
)
_XML_PARAMETER = re.compile(
    r"""<(?:parameter=|parameter name=|param name=)["']?([^"'>\s]+)["']?[^>]*>(.*?)</(?:parameter|param)>""",
    re.DOTALL,
)


def parse_xml(text: str, schemas: Schemas) -> list[Call]:
    """`<function=name><parameter=key>value</parameter></function>` of Qwen3-Coder, and its `invoke` relatives."""
    calls = []
    for name, inside in _XML_FUNCTION.findall(text):
        values = {
            key: typed(value, schemas.get(name, {}), key) for key, value in _XML_PARAMETER.findall(inside)
        }
        calls.append(Call(name, values))
    return _some(calls)


_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_glm(text: str, schemas: Schemas) -> list[Call]:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>...` of GLM 4.5 and later."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        return parse_json(text, schemas)
    schema = schemas.get(name, {})
    return [
        Call(
            name,
            {key.strip(): typed(value, schema, key.strip()) for key, value in _GLM_ARGUMENT.findall(text)},
        )
    ]


_CALL_HEADER = re.compile(r"\s*call:([\w.-]+)\s*")


def parse_gemma(text: str, schemas: Schemas) -> list[Call]:
    """`call:name{key:value,...}` of Gemma: bare keys, `<|"|>`, `<escape>` or any other quotes around strings."""
    text = text.replace("<escape>", '<|"|>')
    calls, at = [], 0
    while text[at:].strip():
        header = _CALL_HEADER.match(text, at)
        if not header:
            raise Malformed("no call:name")
        arguments, at = read_value(text, header.end())
        calls.append(Call(header[1], _object(arguments)))
    return _some(calls)


_PYTHON_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(\s*")
_PYTHON_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")


def parse_pythonic(text: str, schemas: Schemas) -> list[Call]:
    """`[name(key=value, ...), ...]` of Llama 4 and LFM."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise Malformed("not in brackets")
    calls, at, end = [], 1, len(text) - 1
    while text[at:end].strip(" \t\r\n,"):
        header = _PYTHON_CALL.match(text, at)
        if not header:
            raise Malformed("no function name")
        arguments: dict[str, object] = {}
        at = header.end()
        while not text.startswith(")", at):
            keyword = _PYTHON_KEYWORD.match(text, at)
            if not keyword:
                raise Malformed("no keyword")
            arguments[keyword[1]], at = read_value(text, keyword.end())
            at = _after_comma(text, at)
        calls.append(Call(header[1], arguments))
        at += 1
        at = _after_comma(text, at)
    return _some(calls)


_COMMA = re.compile(r"\s*,?\s*")


def _after_comma(text: str, at: int) -> int:
    match = _COMMA.match(text, at)
    assert match
    return match.end()


_KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


def parse_kimi(text: str, schemas: Schemas) -> list[Call]:
    """The calls in a tool-call section of Kimi K2."""
    return _some([Call(name, _object(read_whole(arguments))) for name, arguments in _KIMI_CALL.findall(text)])


# DeepSeek's markers are written with a fullwidth bar and a lower block for a space.
BAR, GAP = "\uff5c", "\u2581"
_DEEPSEEK_CALL = re.compile(
    f"<{BAR}tool{GAP}call{GAP}begin{BAR}>(.*?)<{BAR}tool{GAP}sep{BAR}>(.*?)<{BAR}tool{GAP}call{GAP}end{BAR}>",
    re.DOTALL,
)
_FENCED = re.compile(r"\s*([\w.-]+)\s*```(?:json)?\s*(.*?)```\s*", re.DOTALL)


def parse_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """The calls in a tool-calls section of DeepSeek V3 (`function`, name and fenced JSON) and V3.1 (name and JSON)."""
    calls = []
    for head, rest in _DEEPSEEK_CALL.findall(text):
        fenced = _FENCED.fullmatch(rest)
        name, arguments = fenced.groups() if fenced else (head.strip(), rest)
        calls.append(Call(name, _object(read_whole(arguments))))
    return _some(calls)


_JSON_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_JSON_TAIL = re.compile(r"\s*\}")
_XML_HEADER = re.compile(r"""\s*<(?:function=|function name=|invoke name=)["']?([^"'>\s]+)["']?\s*>""")
_XML_OPENING = re.compile(r"""<(?:parameter=|parameter name=|param name=)["']?([^"'>\s]+)["']?[^>]*>""")
_GLM_HEADER = re.compile(r"\s*([\w.-]+)\s*(?=<)")
_GLM_OPENING = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_GEMMA_HEADER = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_PYTHON_HEADER = re.compile(r"\s*\[?\s*([A-Za-z_][\w.]*)\s*\(")
_KIMI_HEADER = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_KIMI_TAIL = re.compile(r"\s*<\|tool_call_end\|>")
# The list of JSON calls, and the name with the arguments behind it.
_MISTRAL_START = re.compile(
    r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)|'
    r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*(?=\{)"
)
_MISTRAL_TAIL = re.compile(r'(?:\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\})?')
_DEEPSEEK_HEADER = re.compile(
    f"\\s*<{BAR}tool{GAP}call{GAP}begin{BAR}>\\s*(?:function\\s*<{BAR}tool{GAP}sep{BAR}>\\s*([\\w.-]+)\\s*```(?:json)?"
    f"|([\\w.-]+)\\s*<{BAR}tool{GAP}sep{BAR}>)\\s*(?=\\{{)"
)
_DEEPSEEK_TAIL = re.compile(f"\\s*(?:```\\s*)?<{BAR}tool{GAP}call{GAP}end{BAR}>")


def _read_xml(parameters: Mapping[str, object], end: str) -> Reader:
    return TaggedArguments(
        parameters, _XML_OPENING, ("</parameter>", "</param>"), ("</function>", "</invoke>"), end
    )


def _read_glm(parameters: Mapping[str, object], end: str) -> Reader:
    return TaggedArguments(parameters, _GLM_OPENING, ("</arg_value>",), (), end)


def _read_python(parameters: Mapping[str, object], end: str) -> Reader:
    return ArgumentsReader(keywords=True)


def _read_escaped(parameters: Mapping[str, object], end: str) -> Reader:
    return ArgumentsReader(quote="<escape>")


_FORMATS: dict[str, Format] = {
    "json_tools": Format("<tool_call>", "</tool_call>", parse_json, _JSON_HEADER, _JSON_TAIL),
    "qwen3_coder": Format("<tool_call>", "</tool_call>", parse_xml, _XML_HEADER, read=_read_xml),
    "longcat": Format("<longcat_tool_call>", "</longcat_tool_call>", parse_json, _JSON_HEADER, _JSON_TAIL),
    "minimax_m2": Format(
        "<minimax:tool_call>", "</minimax:tool_call>", parse_xml, _XML_HEADER, read=_read_xml
    ),
    "mistral": Format("[TOOL_CALLS]", "", parse_mistral, _MISTRAL_START, _MISTRAL_TAIL),
    "llama3_json": Format("<|python_tag|>", "", parse_json, _JSON_HEADER, _JSON_TAIL, bare=True),
    "glm47": Format("<tool_call>", "</tool_call>", parse_glm, _GLM_HEADER, read=_read_glm),
    "gemma4": Format("<|tool_call>", "<tool_call|>", parse_gemma, _GEMMA_HEADER),
    "function_gemma": Format(
        "<start_function_call>", "<end_function_call>", parse_gemma, _GEMMA_HEADER, read=_read_escaped
    ),
    "pythonic": Format(
        "<|tool_call_start|>", "<|tool_call_end|>", parse_pythonic, _PYTHON_HEADER, read=_read_python
    ),
    "kimi_k2": Format(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", parse_kimi, _KIMI_HEADER, _KIMI_TAIL
    ),
    "deepseek_v3": Format(
        f"<{BAR}tool{GAP}calls{GAP}begin{BAR}>",
        f"<{BAR}tool{GAP}calls{GAP}end{BAR}>",
        parse_deepseek,
        _DEEPSEEK_HEADER,
        _DEEPSEEK_TAIL,
    ),
}
FORMATS: dict[str, Format] = {name: found._replace(name=name) for name, found in _FORMATS.items()}


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise Malformed("no call")
    return calls


def _object(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed("arguments are an object")
    return value
