"""Pico's chat template: Qwen's way of writing tool calls and their answers, and tools as short signatures.

A tool's description stands above its name: a model reads in one direction, so the name can know what the tool is for.
"""

from collections.abc import Sequence

from tools.pico.tool import Tool

# Tokens like any other to who decodes, as in Qwen: a front-end looks for them in the text.
TOOL_MARKERS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

_SIGNATURES = (
    "{{- '<tools>\n' -}}"
    "{%- for tool in tools -%}"
    "{%- set function = tool.function or tool -%}"
    "{%- if function.description -%}{{- '# ' + function.description + '\n' -}}{%- endif -%}"
    "{{- function.name + '(' -}}"
    "{%- set schema = function.parameters or {} -%}"
    "{%- for name, parameter in (schema.properties or {}).items() -%}"
    "{{- name + ('' if name in (schema.required or []) else '?') + ': ' -}}"
    "{%- if parameter.enum -%}{{- parameter.enum | join('|') -}}"
    "{%- elif parameter.type is string -%}{{- parameter.type -}}"
    "{%- elif parameter.type -%}{{- parameter.type | join('|') -}}"
    "{%- else -%}{{- 'any' -}}{%- endif -%}"
    "{%- if parameter.description -%}{{- ' (' + parameter.description + ')' -}}{%- endif -%}"
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{{- ')\n' -}}"
    "{%- endfor -%}"
    "{{- '</tools>' -}}"
)

CHAT_TEMPLATE = (
    "{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}"
    "{%- if tools -%}"
    "{{- '<|system|>' -}}"
    "{%- if first and first.content -%}{{- first.content | trim + '\n\n' -}}{%- endif -%}"
    + _SIGNATURES
    + "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if not (tools and loop.first and message.role == 'system') -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- '<|user|><tool_response>\n' + (message.content or '') | trim + '\n</tool_response>' -}}"
    "{%- else -%}"
    "{%- if message.role == 'user' -%}{{- '<|user|>' -}}"
    "{%- elif message.role == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- else -%}{{- '<|system|>' -}}"
    "{%- endif -%}"
    "{{- (message.content or '') | trim -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set function = call.function or call -%}"
    '{{- \'<tool_call>\n{"name": "\' + function.name + \'", "arguments": \' -}}'
    "{{- function.arguments if function.arguments is string else function.arguments | tojson -}}"
    "{{- '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def system_text(system: str, tools: Sequence[Tool]) -> str:
    """What the template makes of a system prompt and tools; "" if there is neither."""
    if not tools:
        return system
    head = f"{system}\n\n" if system else ""
    return f"{head}<tools>\n{''.join(tool.text for tool in tools)}</tools>"


def response_text(answer: str) -> str:
    """What the template makes of a tool's answer, the user's marker aside."""
    return f"<tool_response>\n{answer}\n</tool_response>"
