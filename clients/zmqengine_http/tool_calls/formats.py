"""How models write tool calls, by family: `json_formats.py`, `tagged_formats.py` and `value_formats.py` together.

The names are those mlx-lm gives its parsers, which cannot be imported without mlx, and ours for what it cannot read.
"""

from __future__ import annotations

from zmqengine_http.tool_calls.call_format import Format
from zmqengine_http.tool_calls.json_formats import JSON_FORMATS
from zmqengine_http.tool_calls.tagged_formats import TAGGED_FORMATS
from zmqengine_http.tool_calls.value_formats import VALUE_FORMATS

FORMATS: dict[str, Format] = {
    name: found._replace(name=name)
    for name, found in {**JSON_FORMATS, **TAGGED_FORMATS, **VALUE_FORMATS}.items()
}
