"""Formats with arguments as bare text between tags, typed by their schema."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zmqengine_http.tool_calls.call_format import CallFormat
from zmqengine_http.tool_calls.json_arguments import ArgumentsParser
from zmqengine_http.tool_calls.json_formats import BAR, parse_json
from zmqengine_http.tool_calls.nested_tags import MARK, parse_nested
from zmqengine_http.tool_calls.tagged_arguments import TaggedArguments, Tags

# DeepSeek and Muse prefix each tag name; MiniCPM wraps values that contain tags in CDATA.
_PREFIX = f"(?:{BAR}DSML{BAR}|atem:)?"
_FUNCTION = rf"""<{_PREFIX}(?:function=|function name=|invoke name=)["']?([^"'<>\s]+)["']?\s*>"""
_PARAMETER = (
    # The name ends where it can: an attribute behind it may hold the same characters.
    rf"""<{_PREFIX}(?:parameter=|parameter name=|param name=)["']?([^"'<>\s]+)(?=["'\s>])["']?"""
    r"""(?:\s+string="(?P<declared>true|false)")?[^<>]*>"""
)

# Hunyuan 3 has a suffix on each tag.
_SUFFIX = r"(?::\w+)?"

_XML_HEADER = re.compile(rf"\s*{_FUNCTION}")
_XML_OPENING = re.compile(_PARAMETER)
_WITHIN_TAG = re.compile(r"<[^>]*")
_XML = Tags(
    _XML_OPENING,
    _WITHIN_TAG,
    ("<parameter=", "<parameter name=", "<param name="),
    ("</parameter>", "</param>"),
    ("</function>", "</invoke>"),
    ("<function=", "<invoke name="),
)


def _prefixed(prefix: str) -> Tags:
    return Tags(
        _XML_OPENING,
        _WITHIN_TAG,
        (f"<{prefix}parameter name=",),
        (f"</{prefix}parameter>",),
        (f"</{prefix}invoke>",),
        (f"<{prefix}invoke name=",),
    )


_DSML = _prefixed(f"{BAR}DSML{BAR}")
_ATEM = _prefixed("atem:")
_MINICPM = Tags(
    re.compile(_PARAMETER + r"(?:<!\[CDATA\[|(?=[^<])|(?=<[^!]))"),
    re.compile(r"<[^>]*(?:>(?:<!?\[?C?D?A?T?A?)?)?"),
    ("<param name=",),
    ("]]></param>", "</param>"),
)
_GLM = Tags(
    re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    re.compile(r"<[^>]*|<arg_key>(?:(?!<arg_value>).)*", re.DOTALL),
    ("<arg_key>",),
    ("</arg_value>",),
    calls=("<tool_call>",),
)
_KIMI = Tags(
    re.compile(r'<\|open\|>argument key="([^"]+)"(?:\s+type="(?P<declared>\w+)")?[^<]*<\|sep\|>'),
    re.compile(r"<(?:(?!<\|sep\|>).)*", re.DOTALL),
    ('<|open|>argument key="',),
    ("<|close|>argument<|sep|>",),
    ("<|close|>call<|sep|>",),
    ('<|open|>call tool="',),
)
_HUNYUAN = Tags(
    re.compile(rf"<arg_key{_SUFFIX}>([^<]*)</arg_key{_SUFFIX}>\s*<arg_value{_SUFFIX}>"),
    re.compile(r"<[^>]*|<arg_key(?:(?!<arg_value[^>]*>).)*", re.DOTALL),
    ("<arg_key:opensource>", "<arg_key>"),
    ("</arg_value:opensource>", "</arg_value>"),
    ("</tool_call:opensource>", "</tool_call>"),
    ("<tool_call:opensource>", "<tool_call>"),
)


def _tagged(start: str, end: str, tags: Tags = _XML, *, header: re.Pattern[str] = _XML_HEADER) -> CallFormat:
    def read(parameters: Mapping[str, object], call_end: str) -> ArgumentsParser:
        return TaggedArguments(parameters, tags, call_end)

    return CallFormat(start, end, header, read=read, follows=(*tags.openings, *tags.ends))


def _named(format_: CallFormat, opener: str, *others: str) -> CallFormat:
    """The format with calls that begin with a tag: the opener, the function's name and a bracket."""
    return format_._replace(opener=opener, shapes=tuple(f"{start}NAME>" for start in (opener, *others)))


_GLM_HEADER = re.compile(r"\s*([\w.-]+)\s*(?=<)")
_MINICPM_HEADER = re.compile(r"""\s*["']?([^"'<>\s]+)["']?\s*>""")
_HUNYUAN_HEADER = re.compile(rf"\s*<tool_call{_SUFFIX}>\s*([\w.-]+)\s*<tool_sep{_SUFFIX}>")
_KIMI_HEADER = re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>')

_FUNCTIONS = ("<function=", "<function name=", "<invoke name=")
_INVOKES = ("<invoke name=", "<function=", "<function name=")
_DSML_BLOCKS = tuple(
    (f"<{BAR}DSML{BAR}{name}>", f"</{BAR}DSML{BAR}{name}>") for name in ("function_calls", "tool_calls")
)


def _dsml(block: int) -> CallFormat:
    """The format of one version, which reads the blocks of the other too."""
    format_ = _tagged(*_DSML_BLOCKS[block], _DSML)._replace(blocks=_DSML_BLOCKS)
    return _named(format_, f"<{BAR}DSML{BAR}invoke name=")


_GLM_CALL = _tagged("<tool_call>", "</tool_call>", _GLM, header=_GLM_HEADER)._replace(
    parse=parse_json, shapes=("NAME<",), wholes=("{",), loose=True
)

TAGGED_FORMATS: dict[str, CallFormat] = {
    "qwen3_coder": _named(
        _tagged("<tool_call>", "</tool_call>", _XML._replace(padded=True)), *_FUNCTIONS
    )._replace(parse=parse_json, wholes=("{",)),
    "seed_oss": _named(_tagged("<seed:tool_call>", "</seed:tool_call>"), *_FUNCTIONS),
    "minimax_m2": _named(_tagged("<minimax:tool_call>", "</minimax:tool_call>"), *_INVOKES),
    # Not streamed: tags are nested.
    "minimax_m3": CallFormat(
        f"{MARK}<tool_call>",
        f"{MARK}</tool_call>",
        re.compile(rf"""\s*{re.escape(MARK)}<invoke name=["']?([^"'\s<>]+)["']?>"""),
        read=None,
        parse=parse_nested,
        shapes=(f"{MARK}<invoke name=NAME>",),
        opener=f"{MARK}<invoke name=",
        call_end=f"{MARK}</invoke>",
    ),
    "deepseek_v32": _dsml(0),
    "deepseek_v4": _dsml(1),
    "muse_spark": _named(
        _tagged("<atem:function_calls>", "</atem:function_calls>", _ATEM), "<atem:invoke name="
    ),
    "minicpm5": _tagged("<function name=", "</function>", _MINICPM, header=_MINICPM_HEADER)._replace(
        shapes=("NAME>",)
    ),
    "glm47": _GLM_CALL,
    "laguna": _GLM_CALL,
    "hunyuan_v3": _tagged(
        "<tool_calls:opensource>", "</tool_calls:opensource>", _HUNYUAN, header=_HUNYUAN_HEADER
    )._replace(
        blocks=(("<tool_calls>", "</tool_calls>"),),
        shapes=("<tool_call:opensource>NAME<tool_sep", "<tool_call>NAME<tool_sep"),
        opener="<tool_call:opensource>",
    ),
    "kimi_k3": _tagged("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _KIMI, header=_KIMI_HEADER)._replace(
        shapes=('<|open|>call tool="NAME"',), opener='<|open|>call tool="'
    ),
}
