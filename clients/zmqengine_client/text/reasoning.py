"""The markers of a model's reasoning, and the bound on it that a worker is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqengine.protocol.messages import ThinkingMax
from zmqengine_client.text.tokenizer import Tokenizer

HARMONY = "<|channel|>"
MUSE = ("<atem:function_calls>", "to=self")
"""Signs of Muse's addressed messages in a template."""
XTML = ("<|open|>", "<|close|>", "<|sep|>")
TAIL_TOKENS = 32
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""

# Tested in order: signs in the template, and the markers of reasoning that they imply.
_SIGNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("<|channel>thought", "<channel|>"), "<|channel>thought", "<channel|>"),
    (XTML, "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    (("<|tool_call:begin|>", "<|think|>"), "<|think|>", "<|end|>"),
    ((":opensource", "<think"), "<think:opensource>", "</think:opensource>"),
    (("[BEGIN FINAL RESPONSE]",), "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    *(
        ((end,), start, end)
        for start, end in (
            ("<|START_THINKING|>", "<|END_THINKING|>"),
            ("<|inner_prefix|>", "<|inner_suffix|>"),
            ("<seed:think>", "</seed:think>"),
            ("<mm:think>", "</mm:think>"),
            ("<longcat_think>", "</longcat_think>"),
            ("[THINK]", "[/THINK]"),
            ("<think>", "</think>"),
        )
    ),
)


class ThinkingMarkers(NamedTuple):
    """The texts around a model's reasoning.

    A model of `messages` reasons in several of them: `answer` is the head of one that answers, `next` that of one whose
    kind the model chooses.
    """

    start: str
    end: str
    messages: bool = False
    answer: str = ""
    next: str = ""

    def are_open(self, text: str) -> bool:
        """Whether a text ends within the reasoning."""
        return text.rfind(self.start) > text.rfind(self.end)


def thinking_markers(facts: Mapping[str, object], chat_template: str | None) -> ThinkingMarkers | None:
    """The markers of a model by its tokenizer bundle or chat template; None if it has none that are known."""
    template = chat_template or ""
    if HARMONY in template and "<|message|>" in template:
        head = "<|start|>assistant<|channel|>"
        return ThinkingMarkers("<|channel|>analysis", "<|end|>", True, f"{head}final<|message|>", head)
    if all(sign in template for sign in MUSE):
        head = "<|start|>assistant"
        return ThinkingMarkers(" to=self", "<|eom|>", True, f"{head}<|message|>", head)
    start, end = facts.get("think_start"), facts.get("think_end")
    if isinstance(start, str) and isinstance(end, str) and start and end:
        return ThinkingMarkers(start, end)
    implied = (
        ThinkingMarkers(start, end) for signs, start, end in _SIGNS if all(sign in template for sign in signs)
    )
    return next(implied, None)


def thinking_max(
    tokenizer: Tokenizer, tokens: int, prompt: Sequence[int], *, opened: bool = False, calls: bool = False
) -> ThinkingMax | None:
    """The bound of `tokens` on the reasoning behind a prompt; None for a model without known markers.

    `opened`: the prompt is known to end within the reasoning. `calls`: the model may call tools behind it.
    """
    markers = thinking_markers(tokenizer.facts, tokenizer.chat_template)
    if markers is None:
        return None
    opener, closer, then = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (markers.start, markers.end, markers.next if calls else markers.answer)
    )
    opened = opened or _is_open(tokenizer, markers, prompt)
    return ThinkingMax(tokens, closer, opener, opened=opened, then=then, repeats=markers.messages)


def _is_open(tokenizer: Tokenizer, markers: ThinkingMarkers, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends within the reasoning."""
    count = TAIL_TOKENS
    while True:
        text = tokenizer.decode(prompt[-count:], skip_special_tokens=False)
        if not markers.messages or count >= len(prompt) or markers.start in text or markers.end in text:
            return markers.are_open(text)
        # A message of reasoning that is continued may be long, and the one before it has its end.
        count *= 2
