"""Which markers a model uses: from the facts of its tokenizer bundle, or from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zmqengine_http.tool_calls.formats import FORMATS, Format

HARMONY = "<|channel|>"


class Markers(NamedTuple):
    """Where reasoning and tool calls are in a model's text. `harmony`: the channels of gpt-oss instead of both."""

    think_start: str = ""
    think_end: str = ""
    calls: Format | None = None
    harmony: bool = False


# In the order of testing: the first of which every part is in the template.
_TEMPLATE_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", (FORMATS["deepseek_v3"].start,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("json_tools", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>", "tools")),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)

_THINK_SIGNS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|channel>thought", "<channel|>"),
)


def find_markers(facts: Mapping[str, object], chat_template: str | None) -> Markers:
    """What to look for in the output of a model.

    `facts` may hold `tool_parser`, `tool_call_start`, `tool_call_end`, `think_start` and `think_end`; what it
    leaves open is read off the chat template.
    """
    template = chat_template or ""
    if HARMONY in template and "<|message|>" in template:
        return Markers(harmony=True)
    return Markers(*_thinking(facts, template), calls=_calls(facts, template))


def _calls(facts: Mapping[str, object], template: str) -> Format | None:
    name = facts.get("tool_parser") or next(
        (name for name, signs in _TEMPLATE_SIGNS if all(sign in template for sign in signs)), None
    )
    found = FORMATS.get(str(name))
    start, end = facts.get("tool_call_start"), facts.get("tool_call_end")
    if found is None and start and end:
        found = FORMATS["json_tools"]
    if found is not None and isinstance(start, str) and start and start != found.start:
        found = found._replace(start=start, end=end if isinstance(end, str) else found.end)
    return found


def _thinking(facts: Mapping[str, object], template: str) -> tuple[str, str]:
    start, end = facts.get("think_start"), facts.get("think_end")
    if isinstance(start, str) and isinstance(end, str) and start and end:
        return start, end
    return next((signs for signs in _THINK_SIGNS if signs[1] in template), ("", ""))
