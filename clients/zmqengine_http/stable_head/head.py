"""The one unit between a request as an agent sends it and the prompt that is made of it.

Agents change the head of their prompts from turn to turn in ways that mean nothing to a model and cost it everything:
what follows the first changed token is computed again. Each change and its cure has a file here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from zmqengine_http.stable_head.answer_memory import AnswerMemory
from zmqengine_http.stable_head.key_order import in_one_order
from zmqengine_http.stable_head.markers import without_markers
from zmqengine_http.stable_head.system_turns import with_one_system_message

PlainMessage = dict[str, object]
"""A message as chat templates read it: text content, arguments of calls as objects."""
PlainTool = dict[str, object]


class HeadChanges(Struct):
    """How often each cure was needed in one request."""

    billing_lines: int = 0
    """Lines of a client's accounts at the start of the system prompt, dropped."""
    countdowns: int = 0
    """Counters of the tokens left, dropped."""
    system_turns: int = 0
    """System messages within the conversation, left in their place as marked user turns."""
    reordered: int = 0
    """Tool lists and schemas that came in another order than the one they are rendered in."""
    restored: int = 0
    """Assistant turns that got back the reasoning, or the order of arguments, that the client had lost."""

    def facts(self) -> dict[str, int]:
        """Those that are not zero."""
        return {name: count for name in self.__struct_fields__ if (count := getattr(self, name))}


class Stabilised(Struct, frozen=True):
    """What to render instead, and what was changed."""

    messages: list[PlainMessage]
    tools: list[PlainTool]
    changes: HeadChanges


class StableHead:
    """Cures requests and says what it cured; safe to use from several threads.

    `memory` holds the calls that were made here. Not `enabled`, everything is rendered as it was sent.
    """

    def __init__(self, memory: AnswerMemory, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.memory = memory

    def stabilise(self, messages: Sequence[PlainMessage], tools: Sequence[PlainTool]) -> Stabilised:
        """The messages and tools to render. The arguments are not changed."""
        changes = HeadChanges()
        if not self.enabled:
            return Stabilised(list(messages), list(tools), changes)
        kept, changes.billing_lines, changes.countdowns = without_markers(messages)
        kept, changes.system_turns = with_one_system_message(kept)
        kept, changes.restored = self.memory.restored(kept)
        ordered, changes.reordered = in_one_order(tools)
        return Stabilised(kept, ordered, changes)
