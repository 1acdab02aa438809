"""Formats with arguments as bare text between tags, typed by their schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zmqengine_http.tool_calls.call_format import CallFormat, ParsedCall, Schemas, nonempty, sections
from zmqengine_http.tool_calls.json_arguments import ArgumentsParser
from zmqengine_http.tool_calls.json_formats import BAR, parse_json
from zmqengine_http.tool_calls.nested_tags import MARK, parse_nested
from zmqengine_http.tool_calls.schema_types import argument_types, convert_text, without_padding
from zmqengine_http.tool_calls.tagged_arguments import TaggedArguments, Tags

# DeepSeek and Muse prefix each tag name; MiniCPM wraps values that contain tags in CDATA.
_PREFIX = f"(?:{BAR}DSML{BAR}|atem:)?"
_FUNCTION = rf"""<{_PREFIX}(?:function=|function name=|invoke name=)["']?([^"'<>\s]+)["']?\s*>"""
_PARAMETER = (
    # The name ends where it can: an attribute behind it may hold the same characters.
    rf"""<{_PREFIX}(?:parameter=|parameter name=|param name=)["']?([^"'<>\s]+)(?=["'\s>])["']?"""
    r"""(?:\s+string="(?P<declared>true|false)")?[^<>]*>"""
)
_CDATA = "<![CDATA["


class _Elements(NamedTuple):
    """The opening and closing tags of calls or arguments; `held_closing`: the one behind a CDATA text."""

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    held_closing: re.Pattern[str] | None = None


_XML_FUNCTIONS = _Elements(re.compile(_FUNCTION), re.compile(rf"</{_PREFIX}(?:function|invoke)>"))
_XML_PARAMETERS = _Elements(
    re.compile(_PARAMETER),
    re.compile(rf"</{_PREFIX}(?:parameter|param)>"),
    re.compile(rf"\]\]></{_PREFIX}(?:parameter|param)>"),
)


def parse_xml(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `<function=name><parameter=key>value</parameter></function>` of Qwen3-Coder, and `invoke`
    variants."""
    return _xml_calls(text, schemas, padded=False)


def parse_padded_xml(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse the format of `parse_xml` with line breaks around each value."""
    return _xml_calls(text, schemas, padded=True)


def _xml_calls(text: str, schemas: Schemas, *, padded: bool) -> list[ParsedCall]:
    return _tagged_calls(text, schemas, _XML_FUNCTIONS, _XML_PARAMETERS, padded=padded)


def _tagged_calls(
    text: str, schemas: Schemas, calls: _Elements, arguments: _Elements, *, padded: bool = False
) -> list[ParsedCall]:
    return nonempty(
        [
            ParsedCall(found[1], _arguments(inside, schemas.get(found[1], {}), arguments, padded=padded))
            for found, inside in sections(text, calls.opening, calls.closing)
        ]
    )


def _arguments(
    inside: str, schema: Mapping[str, object], elements: _Elements, *, padded: bool = False
) -> dict[str, object]:
    """The arguments by their keys, which are the first groups of opening tags."""
    values: dict[str, object] = {}
    for found, text in _texts(inside, elements, padded=padded):
        key = found[1].strip()
        values[key] = convert_text(text, argument_types(schema, key, found.groupdict().get("declared")))
    return values


def _texts(inside: str, elements: _Elements, *, padded: bool) -> Iterator[tuple[re.Match[str], str]]:
    """The opening tags of elements and their texts, in one pass, without CDATA and line breaks around them."""
    at, held_closing = 0, elements.held_closing
    while found := elements.opening.search(inside, at):
        start = found.end()
        if held_closing is not None and inside.startswith(_CDATA, start):
            end = held_closing.search(inside, start)
            if end is not None:
                yield found, inside[start + len(_CDATA) : end.start()]
                at = end.end()
                continue
            # Nor is any later one closed.
            held_closing = None
        end = elements.closing.search(inside, start)
        if end is None:
            return
        yield found, without_padding(inside[start : end.start()], always=padded)
        at = end.end()


def parse_minicpm(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `"name"><param name="key">value</param>...` of MiniCPM 5, whose start marker begins the tag."""
    return parse_xml(f"<function name={text}</function>", schemas)


_GLM_OPENING = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_ARGUMENTS = _Elements(_GLM_OPENING, re.compile("</arg_value>"))


def parse_glm(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `name<arg_key>key</arg_key><arg_value>value</arg_value>...` of GLM 4.5 and later."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        return parse_json(text, schemas)
    return [ParsedCall(name, _arguments(text, schemas.get(name, {}), _GLM_ARGUMENTS))]


# Hunyuan 3 has a suffix on each tag.
_SUFFIX = r"(?::\w+)?"
_HUNYUAN_CALLS = _Elements(
    re.compile(rf"<tool_call{_SUFFIX}>\s*([\w.-]+)\s*<tool_sep{_SUFFIX}>"),
    re.compile(rf"</tool_call{_SUFFIX}>"),
)
_HUNYUAN_OPENING = re.compile(rf"<arg_key{_SUFFIX}>([^<]*)</arg_key{_SUFFIX}>\s*<arg_value{_SUFFIX}>")
_HUNYUAN_ARGUMENTS = _Elements(_HUNYUAN_OPENING, re.compile(rf"</arg_value{_SUFFIX}>"))


def parse_hunyuan(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse a section of Hunyuan 3: `name<tool_sep>` and arguments in GLM's format."""
    return _tagged_calls(text, schemas, _HUNYUAN_CALLS, _HUNYUAN_ARGUMENTS)


_KIMI_CALLS = _Elements(
    re.compile(r'<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>'), re.compile(r"<\|close\|>call<\|sep\|>")
)
_KIMI_OPENING = re.compile(r'<\|open\|>argument key="([^"]+)"(?:\s+type="(?P<declared>\w+)")?[^<]*<\|sep\|>')
_KIMI_ARGUMENTS = _Elements(_KIMI_OPENING, re.compile(r"<\|close\|>argument<\|sep\|>"))


def parse_kimi_tags(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse a tools section of Kimi K3, where each argument's tag states its type."""
    return _tagged_calls(text, schemas, _KIMI_CALLS, _KIMI_ARGUMENTS)


_XML_HEADER = re.compile(rf"\s*{_FUNCTION}")
_XML_OPENING = re.compile(_PARAMETER)
_WITHIN_TAG = re.compile(r"<[^>]*")
_XML = Tags(_XML_OPENING, _WITHIN_TAG, ("</parameter>", "</param>"), ("</function>", "</invoke>"))
_DSML = Tags(_XML_OPENING, _WITHIN_TAG, (f"</{BAR}DSML{BAR}parameter>",), (f"</{BAR}DSML{BAR}invoke>",))
_ATEM = Tags(_XML_OPENING, _WITHIN_TAG, ("</atem:parameter>",), ("</atem:invoke>",))
_MINICPM = Tags(
    re.compile(_PARAMETER + r"(?:<!\[CDATA\[|(?=[^<])|(?=<[^!]))"),
    re.compile(r"<[^>]*(?:>(?:<!?\[?C?D?A?T?A?)?)?"),
    ("]]></param>", "</param>"),
)
_GLM = Tags(
    _GLM_OPENING,
    re.compile(r"<[^>]*|<arg_key>(?:(?!<arg_value>).)*", re.DOTALL),
    ("</arg_value>",),
)
_KIMI = Tags(
    _KIMI_OPENING,
    re.compile(r"<(?:(?!<\|sep\|>).)*", re.DOTALL),
    ("<|close|>argument<|sep|>",),
    ("<|close|>call<|sep|>",),
)
_HUNYUAN = Tags(
    _HUNYUAN_OPENING,
    re.compile(r"<[^>]*|<arg_key(?:(?!<arg_value[^>]*>).)*", re.DOTALL),
    ("</arg_value:opensource>", "</arg_value>"),
    ("</tool_call:opensource>", "</tool_call>"),
)


def _tagged(start: str, end: str, tags: Tags = _XML, *, header: re.Pattern[str] = _XML_HEADER) -> CallFormat:
    def read(parameters: Mapping[str, object], call_end: str) -> ArgumentsParser:
        return TaggedArguments(parameters, tags, call_end)

    return CallFormat(start, end, parse_padded_xml if tags.padded else parse_xml, header, read=read)


_GLM_HEADER = re.compile(r"\s*([\w.-]+)\s*(?=<)")
_MINICPM_HEADER = re.compile(r"""\s*["']?([^"'<>\s]+)["']?\s*>""")
_HUNYUAN_HEADER = re.compile(rf"\s*<tool_call{_SUFFIX}>\s*([\w.-]+)\s*<tool_sep{_SUFFIX}>")
_KIMI_HEADER = re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>')

TAGGED_FORMATS: dict[str, CallFormat] = {
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", _XML._replace(padded=True)),
    "seed_oss": _tagged("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": _tagged("<minimax:tool_call>", "</minimax:tool_call>"),
    # Not streamed: the header never matches.
    "minimax_m3": CallFormat(f"{MARK}<tool_call>", f"{MARK}</tool_call>", parse_nested, re.compile("(?!)")),
    "deepseek_v32": _tagged(f"<{BAR}DSML{BAR}function_calls>", f"</{BAR}DSML{BAR}function_calls>", _DSML),
    "deepseek_v4": _tagged(f"<{BAR}DSML{BAR}tool_calls>", f"</{BAR}DSML{BAR}tool_calls>", _DSML),
    "muse_spark": _tagged("<atem:function_calls>", "</atem:function_calls>", _ATEM),
    "minicpm5": _tagged("<function name=", "</function>", _MINICPM, header=_MINICPM_HEADER)._replace(
        parse=parse_minicpm
    ),
    "glm47": _tagged("<tool_call>", "</tool_call>", _GLM, header=_GLM_HEADER)._replace(parse=parse_glm),
    "laguna": _tagged("<tool_call>", "</tool_call>", _GLM, header=_GLM_HEADER)._replace(parse=parse_glm),
    "hunyuan_v3": _tagged(
        "<tool_calls:opensource>", "</tool_calls:opensource>", _HUNYUAN, header=_HUNYUAN_HEADER
    )._replace(parse=parse_hunyuan),
    "kimi_k3": _tagged("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _KIMI, header=_KIMI_HEADER)._replace(
        parse=parse_kimi_tags
    ),
}
