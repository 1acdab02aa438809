"""Formats with arguments as bare text between tags, typed by their schema."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zmqengine_client.text.tool_calls.call_format import CallFormat
from zmqengine_client.text.tool_calls.call_layout import CallLayout
from zmqengine_client.text.tool_calls.json_arguments import ArgumentsParser
from zmqengine_client.text.tool_calls.json_formats import BAR, parse_json
from zmqengine_client.text.tool_calls.nested_tags import MARK, parse_nested
from zmqengine_client.text.tool_calls.tagged_arguments import TaggedArguments, Tags

# DeepSeek and Muse prefix each tag name; MiniCPM wraps values that contain tags in CDATA.
_PREFIX = f"(?:{BAR}DSML{BAR}|atem:)?"
_FUNCTION = rf"""<{_PREFIX}(?:function=|function name=|invoke name=)\s*["']?([^"'<>\s]+?)["']?\s*/?>"""
_PARAMETER = (
    # The name ends where it can: an attribute behind it may hold the same characters.
    rf"""<{_PREFIX}param(?:eter)?(?:(?=[^<>]*\sstring=["'](?P<declared>true|false)["']))?"""
    r"""(?:=|(?:\s+string=["']\w+["'])?\s+name=)\s*["']?(?P<key>[^"'<>\s]+)(?=["'\s>])["']?[^<>]*>"""
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
    calls=("<function name=",),
)
_GLM = Tags(
    re.compile(r"<arg_key>(?P<key>[^<]*)(?:</arg_key>\s*){0,2}<arg_value>"),
    re.compile(r"<[^>]*|<arg_key>(?:(?!<arg_value>).)*", re.DOTALL),
    ("<arg_key>",),
    ("</arg_value>",),
    calls=("<tool_call>",),
)
_KIMI = Tags(
    re.compile(r'<\|open\|>argument key="(?P<key>[^"]+)"(?:\s+type="(?P<declared>\w+)")?[^<]*<\|sep\|>'),
    re.compile(r"<(?:(?!<\|sep\|>).)*", re.DOTALL),
    ('<|open|>argument key="',),
    ("<|close|>argument<|sep|>",),
    ("<|close|>call<|sep|>",),
    ('<|open|>call tool="',),
)
_HUNYUAN = Tags(
    re.compile(rf"<arg_key{_SUFFIX}>(?P<key>[^<]*)(?:</arg_key{_SUFFIX}>\s*){{0,2}}<arg_value{_SUFFIX}>"),
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
    """The format with calls that begin with a tag: the opener, the function's name and a bracket; or in JSON."""
    return format_._replace(
        parse=parse_json,
        wholes=("{",),
        opener=opener,
        shapes=tuple(f"{start}NAME{end}" for start in (opener, *others) for end in (">", "/>")),
    )


_GLM_HEADER = re.compile(r"\s*([\w.-]+)\s*(?=[<{])")
_MINICPM_HEADER = re.compile(r"""\s*["']?([^"'<>\s]+?)["']?\s*/?>""")
_HUNYUAN_HEADER = re.compile(rf"\s*<tool_call{_SUFFIX}>\s*([\w.-]+)\s*<tool_sep{_SUFFIX}>")
_KIMI_HEADER = re.compile(r'\s*<\|open\|>call tool="([\w.-]+)"[^<]*<\|sep\|>')

_FUNCTIONS = ("<function=", "<function name=", "<invoke name=")
_INVOKES = ("<invoke name=", "<function=", "<function name=")
_DSML_BLOCKS = tuple(
    (f"<{BAR}DSML{BAR}{name}>", f"</{BAR}DSML{BAR}{name}>") for name in ("function_calls", "tool_calls")
)


def _function_tags(start: str, end: str, padding: str, tags: Tags) -> CallFormat:
    """Tags of a function and its parameters, a block for each call, with `padding` around values."""
    layout = CallLayout(
        "<function=«name»>\n«arguments»</function>\n",
        before="\n", between=f"{end}\n{start}\n", after=end,
        argument=f"<parameter=«key»>{padding}", closing=f"{padding}</parameter>", behind="\n",
    )  # fmt: skip
    return _named(_tagged(start, end, tags), *_FUNCTIONS)._replace(layouts=(layout,))


def _invoke_tags(start: str, end: str, prefix: str, tags: Tags, *, typed: bool = False) -> CallFormat:
    """Tags of an invoke and its parameters, a block for all calls."""
    stated = ' string="«string»"' if typed else ""
    layout = CallLayout(
        f'<{prefix}invoke name="«name»">\n«arguments»</{prefix}invoke>\n', before="\n", after=end,
        argument=f'<{prefix}parameter name="«key»"{stated}>', closing=f"</{prefix}parameter>", behind="\n",
        typed=typed,
    )  # fmt: skip
    openers = _INVOKES if not prefix else (f"<{prefix}invoke name=",)
    return _named(_tagged(start, end, tags), *openers)._replace(layouts=(layout,))


def _dsml(block: int) -> CallFormat:
    """The format of one version, which reads the blocks of the other too."""
    return _invoke_tags(*_DSML_BLOCKS[block], f"{BAR}DSML{BAR}", _DSML, typed=True)._replace(
        blocks=_DSML_BLOCKS
    )


# Only some models of the family write line breaks between the tags.
_GLM_LAYOUT = CallLayout(
    "«name»«line»«arguments»", between="</tool_call>«line»<tool_call>", after="</tool_call>",
    argument="<arg_key>«key»</arg_key>«line»<arg_value>", closing="</arg_value>", behind="«line»",
    markers=("<arg_key>", "</arg_key>", "<arg_value>"),
)  # fmt: skip
_GLM_CALL = _tagged("<tool_call>", "</tool_call>", _GLM, header=_GLM_HEADER)._replace(
    parse=parse_json, shapes=("NAME<", "NAME{"), wholes=("{",), loose=True, layouts=(_GLM_LAYOUT,)
)
_HUNYUAN_LAYOUT = CallLayout(
    "<tool_call:opensource>«name»<tool_sep:opensource>\n«arguments»</tool_call:opensource>\n",
    before="\n", after="</tool_calls:opensource>",
    argument="<arg_key:opensource>«key»</arg_key:opensource>\n<arg_value:opensource>",
    closing="</arg_value:opensource>", behind="\n",
)  # fmt: skip
_KIMI_LAYOUT = CallLayout(
    '<|open|>call tool="«name»" index="«number»"<|sep|>«arguments»<|close|>call<|sep|>',
    after="<|close|>tools<|sep|>",
    argument='<|open|>argument key="«key»"<|sep|>', closing="<|close|>argument<|sep|>",
)  # fmt: skip
_MINICPM_LAYOUT = CallLayout(
    '"«name»">«arguments»', between="</function>\n<function name=", after="</function>",
    argument='<param name="«key»">', closing="</param>",
)  # fmt: skip

TAGGED_FORMATS: dict[str, CallFormat] = {
    "qwen3_coder": _function_tags("<tool_call>", "</tool_call>", "\n", _XML._replace(padded=True)),
    "seed_oss": _function_tags("<seed:tool_call>", "</seed:tool_call>", "", _XML),
    "minimax_m2": _invoke_tags("<minimax:tool_call>", "</minimax:tool_call>", "", _XML),
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
        constrained=False,
    ),
    "deepseek_v32": _dsml(0),
    "deepseek_v4": _dsml(1),
    # Its calls stand in messages with an address.
    "muse_spark": _invoke_tags("<atem:function_calls>", "</atem:function_calls>", "atem:", _ATEM)._replace(
        constrained=False
    ),
    "minicpm5": _tagged("<function name=", "</function>", _MINICPM, header=_MINICPM_HEADER)._replace(
        shapes=("NAME>", "NAME/>"), constrained=False, layouts=(_MINICPM_LAYOUT,)
    ),
    "glm47": _GLM_CALL,
    "laguna": _GLM_CALL,
    "hunyuan_v3": _tagged(
        "<tool_calls:opensource>", "</tool_calls:opensource>", _HUNYUAN, header=_HUNYUAN_HEADER
    )._replace(
        blocks=(("<tool_calls>", "</tool_calls>"),),
        shapes=("<tool_call:opensource>NAME<tool_sep", "<tool_call>NAME<tool_sep"),
        opener="<tool_call:opensource>",
        constrained=False,
        layouts=(_HUNYUAN_LAYOUT,),
    ),
    "kimi_k3": _tagged("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _KIMI, header=_KIMI_HEADER)._replace(
        shapes=('<|open|>call tool="NAME',),
        opener='<|open|>call tool="',
        constrained=False,
        layouts=(_KIMI_LAYOUT,),
    ),
}
