"""Export of a tokenizer that mlx-lm has loaded, for front-ends that encode and decode text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from zmqengine.errors import ModelLoadError
from zmqengine.vision_card import VisionCard

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    """A tokenizer for front-ends. `tokenizer_json`: in the format of the `tokenizers` library.

    `special_tokens` are the strings that a chat template may use by name. `facts` are:

    - `clean_up_tokenization_spaces`: decoding removes the space before punctuation;
    - `think_start`, `think_end`: the texts around reasoning, if the model reasons;
    - `tool_call_start`, `tool_call_end`, `tool_parser`: the texts around a tool call and mlx-lm's name for its
      form, if the model calls tools; `tool_call_end` may be empty: the call ends with the output;
    - `thinking_keyword`: the template's variable that turns reasoning on or off;
    - `default_temperature`, `default_top_p`, `default_top_k`: recommended sampling parameters, numbers as text;
    - `chat_template_NAME`: further templates by name;
    - `blind`: the reason for which a model with a vision tower takes no images here;
    - `chat_template_type`: mlx-lm's name of a template that is a program; `chat_template` is None then.

    `hash` covers every other field.
    """

    tokenizer_json: bytes
    chat_template: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    facts: dict[str, str | bool | int]
    hash: str = ""
    vision: VisionCard | None = None


def export_tokenizer(tokenizer: Any) -> ExportedTokenizer:
    """Export a tokenizer that mlx-lm has loaded. Raises ModelLoadError if it has no `tokenizers` form."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__
        raise ModelLoadError(f"the tokenizer ({kind}) has no fast form: the model needs a tokenizer.json")
    default, others = _templates(tokenizer.chat_template)
    facts: dict[str, str | bool | int] = {
        "clean_up_tokenization_spaces": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        **others,
        **_hints(tokenizer),
    }
    if tokenizer._chat_template is not None:
        default = None
        facts["chat_template_type"] = tokenizer._chat_template.__module__.rpartition(".")[2]
    exported = ExportedTokenizer(
        tokenizer_json=backend.to_str().encode(),
        chat_template=default,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        special_tokens=_special_tokens(tokenizer),
        facts=facts,
    )
    return replace(exported, hash=_hash(exported))


def with_facts(exported: ExportedTokenizer, facts: Mapping[str, str | bool | int]) -> ExportedTokenizer:
    """The bundle with further facts."""
    known = replace(exported, facts={**exported.facts, **facts})
    return replace(known, hash=_hash(known))


def with_vision(exported: ExportedTokenizer, card: VisionCard) -> ExportedTokenizer:
    """The bundle with a model's vision card."""
    seeing = replace(exported, vision=card)
    return replace(seeing, hash=_hash(seeing))


def without_vision(exported: ExportedTokenizer, reason: str) -> ExportedTokenizer:
    """The bundle with the reason for which a model with a vision tower takes no images."""
    return with_facts(exported, {"blind": reason})


def _hash(exported: ExportedTokenizer) -> str:
    """SHA-256, in hexadecimal, over every field but the hash itself."""
    rest = [exported.chat_template, exported.eos_token_ids, exported.special_tokens, exported.facts]
    digest = hashlib.sha256(exported.tokenizer_json)
    if exported.vision is not None:
        digest.update(msgspec.json.encode(exported.vision))
    digest.update(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    values = {name: getattr(tokenizer, name, None) for name in _SPECIAL_TOKENS}
    return {name: str(value) for name, value in values.items() if value is not None}


def _templates(template: Any) -> tuple[str | None, dict[str, str]]:
    """The default template, and others as facts."""
    if not isinstance(template, dict):
        return template, {}
    others = {f"chat_template_{name}": text for name, text in template.items() if name != "default"}
    return template.get("default"), others


def _hints(tokenizer: Any) -> dict[str, str]:
    hints: dict[str, str] = {}
    if tokenizer.has_thinking:
        hints["think_start"] = tokenizer.think_start
        hints["think_end"] = tokenizer.think_end
        hints["thinking_keyword"] = tokenizer._thinking_kwarg
    if tokenizer.has_tool_calling:
        hints["tool_call_start"] = tokenizer.tool_call_start
        hints["tool_call_end"] = tokenizer.tool_call_end or ""
        hints["tool_parser"] = str(tokenizer.init_kwargs.get("tool_parser_type", ""))
    return hints
