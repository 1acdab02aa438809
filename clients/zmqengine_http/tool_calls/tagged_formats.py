"""Formats with arguments as bare text between tags, typed by their schema."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zmqengine_http.tool_calls.call_format import CallFormat, ParsedCall, Schemas, nonempty
from zmqengine_http.tool_calls.json_arguments import ArgumentsParser
from zmqengine_http.tool_calls.json_formats import BAR, parse_json
from zmqengine_http.tool_calls.nested_tags import MARK, parse_nested
from zmqengine_http.tool_calls.schema_types import argument_types, convert_text, without_padding
from zmqengine_http.tool_calls.tagged_arguments import TaggedArguments, Tags

# DeepSeek and Muse prefix each tag name; MiniCPM wraps values that contain tags in CDATA.
_PREFIX = f"(?:{BAR}DSML{BAR}|atem:)?"
_FUNCTION = rf"""<{_PREFIX}(?:function=|function name=|invoke name=)["']?([^"'>\s]+)["']?\s*>"""
_PARAMETER = (
    rf"""<{_PREFIX}(?:parameter=|parameter name=|param name=)["']?([^"'>\s]+)["']?"""
    r"""(?:\s+string="(?P<told>true|false)")?[^>]*>"""
)
_XML_FUNCTION = re.compile(rf"{_FUNCTION}(.*?)</{_PREFIX}(?:function|invoke)>", re.DOTALL)
_XML_PARAMETER = re.compile(
    rf"{_PARAMETER}(?:<!\[CDATA\[(?P<held>.*?)\]\]>|(?P<value>.*?))</{_PREFIX}(?:parameter|param)>", re.DOTALL
)


def parse_xml(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `<function=name><parameter=key>value</parameter></function>` of Qwen3-Coder, and `invoke`
    variants."""
    return _xml_calls(text, schemas, padded=False)


def parse_padded_xml(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse the format of `parse_xml` with line breaks around each value."""
    return _xml_calls(text, schemas, padded=True)


def _xml_calls(text: str, schemas: Schemas, *, padded: bool) -> list[ParsedCall]:
    return _tagged_calls(text, schemas, _XML_FUNCTION, _XML_PARAMETER, padded=padded)


def _tagged_calls(
    text: str, schemas: Schemas, call: re.Pattern[str], argument: re.Pattern[str], *, padded: bool = False
) -> list[ParsedCall]:
    return nonempty(
        [
            ParsedCall(name, _arguments(inside, schemas.get(name, {}), argument, padded=padded))
            for name, inside in call.findall(text)
        ]
    )


def _arguments(
    inside: str, schema: Mapping[str, object], argument: re.Pattern[str], *, padded: bool = False
) -> dict[str, object]:
    """The arguments that `argument` matches: first group the key, `value` the text, or `held` a CDATA
    text."""
    values: dict[str, object] = {}
    for found in argument.finditer(inside):
        key, groups = found[1].strip(), found.groupdict()
        text = groups.get("held")
        if text is None:
            text = without_padding(groups["value"], always=padded)
        values[key] = convert_text(text, argument_types(schema, key, groups.get("told")))
    return values


def parse_minicpm(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `"name"><param name="key">value</param>...` of MiniCPM 5, whose start marker begins the tag."""
    return parse_xml(f"<function name={text}</function>", schemas)


_GLM_OPENING = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_GLM_ARGUMENT = re.compile(rf"{_GLM_OPENING.pattern}(?P<value>.*?)</arg_value>", re.DOTALL)


def parse_glm(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse `name<arg_key>key</arg_key><arg_value>value</arg_value>...` of GLM 4.5 and later."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        return parse_json(text, schemas)
    return [ParsedCall(name, _arguments(text, schemas.get(name, {}), _GLM_ARGUMENT))]


# Hunyuan 3 has a suffix on each tag.
_SUFFIX = r"(?::\w+)?"
_HUNYUAN_CALL = re.compile(
    rf"<tool_call{_SUFFIX}>\s*([\w.-]+)\s*<tool_sep{_SUFFIX}>(.*?)</tool_call{_SUFFIX}>", re.DOTALL
)
_HUNYUAN_OPENING = re.compile(
    rf"<arg_key{_SUFFIX}>(.*?)</arg_key{_SUFFIX}>\s*<arg_value{_SUFFIX}>", re.DOTALL
)
_HUNYUAN_ARGUMENT = re.compile(rf"{_HUNYUAN_OPENING.pattern}(?P<value>.*?)</arg_value{_SUFFIX}>", re.DOTALL)


def parse_hunyuan(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse a section of Hunyuan 3: `name<tool_sep>` and arguments in GLM's format."""
    return _tagged_calls(text, schemas, _HUNYUAN_CALL, _HUNYUAN_ARGUMENT)


_KIMI_CALL = re.compile(
    r'<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>(.*?)<\|close\|>call<\|sep\|>', re.DOTALL
)
_KIMI_OPENING = re.compile(
    r'<\|open\|>argument key="([^"]+)"(?:\s+type="(?P<told>\w+)")?[^<]*<\|sep\|>', re.DOTALL
)
_KIMI_ARGUMENT = re.compile(rf"{_KIMI_OPENING.pattern}(?P<value>.*?)<\|close\|>argument<\|sep\|>", re.DOTALL)


def parse_kimi_tags(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse a tools section of Kimi K3, where each argument's tag states its type."""
    return _tagged_calls(text, schemas, _KIMI_CALL, _KIMI_ARGUMENT)


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
