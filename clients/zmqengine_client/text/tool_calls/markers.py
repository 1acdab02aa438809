"""The table of formats, and the detection of a model's markers from its tokenizer bundle or chat template.

The names of formats are those of mlx-lm's tool parsers, which cannot be imported without mlx, and our own
where mlx-lm has no parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zmqengine_client.text.reasoning import HARMONY, MUSE, XTML, thinking_markers
from zmqengine_client.text.tool_calls.call_format import CallFormat
from zmqengine_client.text.tool_calls.json_formats import JSON_FORMATS
from zmqengine_client.text.tool_calls.tagged_formats import TAGGED_FORMATS
from zmqengine_client.text.tool_calls.value_formats import VALUE_FORMATS

FORMATS: dict[str, CallFormat] = {
    name: found._replace(name=name)
    for name, found in {**JSON_FORMATS, **TAGGED_FORMATS, **VALUE_FORMATS}.items()
}


_ADDRESSED = FORMATS["muse_spark"]
_GENERAL = "json_tools"
"""The worker's name for any JSON call between tags; the template may identify a more specific format."""


class Markers(NamedTuple):
    """The markers of reasoning and tool calls in a model's output.

    `frames`: markers around the content that are dropped from it. `harmony`: the model uses the channels of
    gpt-oss instead of markers; `addressed`: the messages of Muse.
    """

    think_start: str = ""
    think_end: str = ""
    calls: CallFormat | None = None
    harmony: bool = False
    frames: tuple[str, ...] = ()
    addressed: bool = False

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt, of which this is the end, ends within the reasoning."""
        return bool(self.think_start) and prompt.rfind(self.think_start) > prompt.rfind(self.think_end)


# Tested in order: a format is detected if all of its signs are in the template.
_TEMPLATE_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((name, (FORMATS[name].start,)) for name in ("minimax_m2", "seed_oss")),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("deepseek_v32", ("DSML", "function_calls")),
    ("deepseek_v4", ("DSML", "tool_calls")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("kimi_k3", XTML),
    ("hunyuan_v3", (":opensource", "<tool_sep")),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("solar_open", ("<|tool_call:begin|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("minicpm5", ('<function name="', '<param name="')),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", (FORMATS["deepseek_v3"].start,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini", ("<|tool_call|>", "<|/tool_call|>")),
    # Phi-4-mini's own template renders only the tools, no calls.
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    *((name, (FORMATS[name].start,)) for name in ("granite", "nemotron", "internlm2", "gigachat3")),
    *((name, (FORMATS[name].start,)) for name in ("cohere", "apertus")),
    ("olmo3", ("<function_calls>", "<functions>")),
    ("json_list", ("<tool_calls>", "</tool_calls>")),
    ("json_tools", ("<tool_call>",)),
    ("functionary", ("<function=", "<|python_tag|>")),
    ("llama4_json", ("<|python_start|>", "tools")),
    ("llama3_json", ("<|python_tag|>", "tools")),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)  # fmt: skip

_FRAMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("<|START_RESPONSE|>",), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    (("<|START_TEXT|>",), ("<|START_TEXT|>", "<|END_TEXT|>")),
    (
        XTML,
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    (("<|tool_call:begin|>", "<|think|>"), ("<|begin|>assistant", "<|content|>", "<|end|>")),
    (("[END FINAL RESPONSE]",), ("[END FINAL RESPONSE]",)),
)
"""Signs in the template, and the markers around the content that they imply."""


def find_markers(facts: Mapping[str, object], chat_template: str | None) -> Markers:
    """Detect the markers of a model's output.

    `facts` may hold `tool_parser`, `tool_call_start`, `tool_call_end`, `think_start` and `think_end`; missing
    facts are derived from the chat template.
    """
    template = chat_template or ""
    if HARMONY in template and "<|message|>" in template:
        return Markers(harmony=True)
    if _has(template, MUSE):
        return Markers(calls=_ADDRESSED, addressed=True)
    frames = [each for signs, marks in _FRAMES if _has(template, signs) for each in marks]
    thinking = thinking_markers(facts, template)
    texts = (thinking.start, thinking.end) if thinking is not None else ("", "")
    return Markers(*texts, calls=_calls(facts, template), frames=tuple(frames))


def _calls(facts: Mapping[str, object], template: str) -> CallFormat | None:
    signed = next((name for name, signs in _TEMPLATE_SIGNS if _has(template, signs)), None)
    given = facts.get("tool_parser")
    if signed and given in (None, "", _GENERAL):
        return FORMATS[signed]
    found = FORMATS.get(str(given))
    start, end = facts.get("tool_call_start"), facts.get("tool_call_end")
    if found is None and start and end:
        found = FORMATS[_GENERAL]
    if found is not None and isinstance(start, str) and start and start != found.start:
        found = found._replace(start=start, end=end if isinstance(end, str) else found.end)
    return found


def _has(template: str, signs: tuple[str, ...]) -> bool:
    return all(sign in template for sign in signs)
