"""Formats with arguments as Gemma or Python literals."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zmqengine_client.text.tool_calls.call_format import CallFormat
from zmqengine_client.text.tool_calls.call_layout import (
    FUNCTION_GEMMA,
    GEMMA,
    PYTHON,
    CallLayout,
    LiteralStyle,
)
from zmqengine_client.text.tool_calls.json_arguments import ArgumentsParser, JsonArguments
from zmqengine_client.text.tool_calls.json_formats import (
    EITHER_HEADER,
    EITHER_TAIL,
    JSON_SHAPES,
    PYTHON_HEADER,
    WHOLE_JSON,
    parse_json,
    read_python,
)

_GEMMA_HEADER = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")


def _read_escaped(parameters: Mapping[str, object], end: str) -> ArgumentsParser:
    return JsonArguments(quote="<escape>")


def _gemma(start: str, end: str, style: LiteralStyle) -> CallFormat:
    layout = CallLayout("call:«name»{«arguments»}", between=f"{end}{start}", after=end, style=style)
    return CallFormat(
        start, end, _GEMMA_HEADER, shapes=("call:NAME{",), opener="call:",
        layouts=(layout._replace(markers=(style.quote,)),),
    )  # fmt: skip


_PYTHON_CALL = "«name»(«arguments»)"
VALUE_FORMATS: dict[str, CallFormat] = {
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", GEMMA),
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", FUNCTION_GEMMA)._replace(
        read=_read_escaped
    ),
    "pythonic": CallFormat(
        "<|tool_call_start|>", "<|tool_call_end|>", EITHER_HEADER, EITHER_TAIL, read=read_python, parse=parse_json,
        shapes=("NAME(", *JSON_SHAPES), wholes=WHOLE_JSON, opener="[",
        layouts=(CallLayout(_PYTHON_CALL, before="[", between=", ", after="]<|tool_call_end|>", style=PYTHON),),
    ),
    # A line of prose or code looks like a call without its markers.
    "olmo3": CallFormat(
        "<function_calls>", "</function_calls>", PYTHON_HEADER, read=read_python, parse=parse_json,
        shapes=("NAME(",), wholes=WHOLE_JSON,
        layouts=(CallLayout(_PYTHON_CALL, between="\n", after="</function_calls>", style=PYTHON),),
    ),
}  # fmt: skip
