"""Formats with arguments as Gemma or Python literals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from zmqengine_http.tool_calls.call_format import (
    CallFormat,
    ParsedCall,
    Schemas,
    as_arguments,
    nonempty,
    skip,
)
from zmqengine_http.tool_calls.json_arguments import ArgumentsParser, JsonArguments
from zmqengine_http.tool_calls.lenient_json import Malformed, read_value

_CALL_HEADER = re.compile(r"\s*call:([\w.-]+)\s*")


def parse_gemma(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `call:name{key:value,...}` of Gemma: bare keys, and `<|"|>`, `<escape>` or usual quotes around
    strings."""
    text = text.replace("<escape>", '<|"|>')
    calls, at = [], 0
    while (at := skip(text, at)) < len(text):
        header = _CALL_HEADER.match(text, at)
        if not header:
            raise Malformed("no call:name")
        arguments, at = read_value(text, header.end())
        calls.append(ParsedCall(header[1], as_arguments(arguments)))
    return nonempty(calls)


_PYTHON_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(\s*")
_PYTHON_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")


def parse_pythonic(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `[name(key=value, ...), ...]` of Llama 4 and LFM; without brackets, one per line, of OLMo 3."""
    text = text.strip()
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    calls, at, end = [], 0, len(inside)
    while (at := skip(inside, at, " \t\r\n,")) < end:
        header = _PYTHON_CALL.match(inside, at)
        if not header:
            raise Malformed("no function name")
        arguments: dict[str, object] = {}
        at = header.end()
        while not inside.startswith(")", at):
            keyword = _PYTHON_KEYWORD.match(inside, at)
            if not keyword:
                raise Malformed("no keyword")
            arguments[keyword[1]], at = read_value(inside, keyword.end())
            at = _after_comma(inside, at)
        calls.append(ParsedCall(header[1], arguments))
        at += 1
        at = _after_comma(inside, at)
    return nonempty(calls)


_COMMA = re.compile(r"\s*(?:,\s*)?")


def _after_comma(text: str, at: int) -> int:
    match = _COMMA.match(text, at)
    assert match
    return match.end()


_GEMMA_HEADER = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_PYTHON_HEADER = re.compile(r"\s*(?:\[\s*)?([A-Za-z_][\w.]*)\s*\(")


def _read_python(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    return JsonArguments(keywords=True)


def _read_escaped(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    return JsonArguments(quote="<escape>")


def _write_python(calls: Sequence[ParsedCall]) -> str:
    each = (
        f"{call.name}({', '.join(f'{name}={_python(value)}' for name, value in call.arguments.items())})"
        for call in calls
    )
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


def _python(value: object) -> str:
    """A value as a Python literal, its strings in JSON's double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return repr(value)


VALUE_FORMATS: dict[str, CallFormat] = {
    "gemma4": CallFormat("<|tool_call>", "<tool_call|>", parse_gemma, _GEMMA_HEADER),
    "function_gemma": CallFormat(
        "<start_function_call>", "<end_function_call>", parse_gemma, _GEMMA_HEADER, read=_read_escaped
    ),
    "pythonic": CallFormat(
        "<|tool_call_start|>", "<|tool_call_end|>", parse_pythonic, _PYTHON_HEADER,
        read=_read_python, write=_write_python,
    ),
    "olmo3": CallFormat("<function_calls>", "</function_calls>", parse_pythonic, _PYTHON_HEADER, read=_read_python),
}  # fmt: skip
