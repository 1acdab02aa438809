"""Incremental parsers of a model's output: text to reasoning, content and tool calls, by the model's own
format."""

from collections.abc import Mapping

from zmqengine_client.text.tool_calls.call_format import CallFormat, ParsedCall
from zmqengine_client.text.tool_calls.deltas import Delta, TextSplitter
from zmqengine_client.text.tool_calls.harmony import HarmonySplitter
from zmqengine_client.text.tool_calls.markers import FORMATS, Markers, find_markers
from zmqengine_client.text.tool_calls.muse import MuseSplitter
from zmqengine_client.text.tool_calls.splitter import MarkerSplitter

__all__ = [
    "FORMATS",
    "CallFormat",
    "Delta",
    "HarmonySplitter",
    "MarkerSplitter",
    "Markers",
    "ParsedCall",
    "TextSplitter",
    "find_markers",
    "make_splitter",
]


def make_splitter(
    markers: Markers, *, reasoning_open: bool, tools: Mapping[str, Mapping[str, object]]
) -> TextSplitter | None:
    """A splitter for one output of a model, or None if its text is all content.

    `tools`: the parameter schemas of the offered functions, by name; without any, calls are parsed as text.
    """
    if markers.harmony:
        return HarmonySplitter(calls=bool(tools), names=tools)
    if markers.addressed:
        return MuseSplitter(markers.calls if tools else None, tools)
    if not (markers.think_end or markers.frames or (tools and markers.calls)):
        return None
    return MarkerSplitter(markers, reasoning_open=reasoning_open, calls=bool(tools), schemas=tools)
