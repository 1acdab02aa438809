"""Formats with arguments as Gemma or Python literals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from zmqengine_http.tool_calls.call_format import CallFormat, ParsedCall
from zmqengine_http.tool_calls.json_arguments import ArgumentsParser, JsonArguments

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
    "gemma4": CallFormat("<|tool_call>", "<tool_call|>", _GEMMA_HEADER, shapes=("call:NAME{",), opener="call:"),
    "function_gemma": CallFormat(
        "<start_function_call>", "<end_function_call>", _GEMMA_HEADER, read=_read_escaped,
        shapes=("call:NAME{",), opener="call:",
    ),
    "pythonic": CallFormat(
        "<|tool_call_start|>", "<|tool_call_end|>", _PYTHON_HEADER, read=_read_python, write=_write_python,
        shapes=("NAME(",), opener="[",
    ),
    # A line of prose or code looks like a call without its markers.
    "olmo3": CallFormat(
        "<function_calls>", "</function_calls>", _PYTHON_HEADER, read=_read_python, shapes=("NAME(",)
    ),
}  # fmt: skip
