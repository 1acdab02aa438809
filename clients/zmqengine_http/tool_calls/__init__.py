"""From a model's text to reasoning, content and tool calls, by the model's own format."""

from collections.abc import Mapping

from zmqengine_http.tool_calls.addressed import AddressedSplitter
from zmqengine_http.tool_calls.call_format import Call, Format
from zmqengine_http.tool_calls.deltas import Delta, TextSplitter
from zmqengine_http.tool_calls.formats import FORMATS
from zmqengine_http.tool_calls.harmony import HarmonySplitter
from zmqengine_http.tool_calls.markers import Markers, find_markers
from zmqengine_http.tool_calls.splitter import Splitter

__all__ = [
    "FORMATS",
    "Call",
    "Delta",
    "Format",
    "HarmonySplitter",
    "Markers",
    "Splitter",
    "TextSplitter",
    "find_markers",
    "make_splitter",
]


def make_splitter(
    markers: Markers, *, reasoning_open: bool, tools: Mapping[str, Mapping[str, object]]
) -> TextSplitter | None:
    """A splitter for one answer of a model, or None if its text is all content.

    `tools` holds the parameter schemas of the offered functions by name; without any, calls are text.
    """
    if markers.harmony:
        return HarmonySplitter(calls=bool(tools))
    if markers.addressed:
        return AddressedSplitter(markers.calls if tools else None, tools)
    if not (markers.think_end or markers.frames or (tools and markers.calls)):
        return None
    return Splitter(markers, reasoning_open=reasoning_open, calls=bool(tools), schemas=tools)
