"""The corpus that pico learns from: short stories as plain text, and chats of several turns.

Everything comes from a seed. The train and held-out splits share no story, no sum in the same words, no list
of words to repeat: each such item belongs to one split by a hash of what it says. Only small talk is in both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tools.pico import chat
from tools.pico.chat import Turn
from tools.pico.draw import Draw, Split
from tools.pico.story import Story, any_name, tell
from tools.pico.template import response_text, system_text
from tools.pico.tool import Tool

ASSISTANT_NAME = "pico"
_STORY_SHARE = 0.25
_LONG_CHAT_SHARE = 0.04
_SYSTEM_SHARE = 0.25


@dataclass(frozen=True)
class StoryDocument:
    """One story as plain text, with no chat around it."""

    story: Story

    @property
    def text(self) -> str:
        return self.story.text


@dataclass(frozen=True)
class ChatDocument:
    """A chat: an optional system prompt ("" for none), the tools it offers and the turns that follow."""

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def text(self) -> str:
        lines = [system_text(self.system, self.tools)]
        for turn in self.turns:
            called = [turn.call.text, response_text(turn.call.answer)] if turn.call else []
            lines += [turn.user, *called, turn.answer]
        return "\n".join(lines)

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        """Its tools as a chat template takes them."""
        return [tool.definition for tool in self.tools] or None

    def messages(self, turn_index: int, called: bool = False) -> list[dict[str, Any]]:
        """The messages up to and including the user's part of one turn, as a chat template takes them.

        With `called`, the turn's call and what the tool answered too: the answer in words comes next.
        """
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:turn_index]:
            messages += [*_asked(turn, called=True), {"role": "assistant", "content": turn.answer}]
        return messages + _asked(self.turns[turn_index], called)


Document = StoryDocument | ChatDocument


def _asked(turn: Turn, called: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": turn.user}]
    if called and turn.call:
        messages += [turn.call.message, {"role": "tool", "content": turn.call.answer}]
    return messages


def documents(split: Split, seed: int) -> Iterator[Document]:
    """An endless stream of documents of one split; the same seed gives the same stream."""
    draw = Draw(seed, split)
    while True:
        yield StoryDocument(tell(draw)) if draw.chance(_STORY_SHARE) else _chat(draw)


def copying_lessons(seed: int, count: int) -> Iterator[Document]:
    """`count` documents of the train split: at first only short lists to repeat, then longer ones and other documents.

    A model that starts with lists of up to three words learns to copy what it reads, on which names, answers and
    repeating rest, within a few hundred steps; long lists, or stories, teach the same only much later.
    """
    draw = Draw(seed, "train")
    others = documents("train", seed)
    for index in range(count):
        progress = index / count
        if draw.chance(0.5 * progress):
            yield next(others)
        else:
            yield ChatDocument("", (chat.plain_repeating(draw, round(3 + 12 * progress)),))


def sample(split: Split, seed: int, count: int) -> list[Document]:
    """The first `count` documents of a stream."""
    return list(islice(documents(split, seed), count))


def _chat(draw: Draw) -> ChatDocument:
    while True:
        document = _any_chat(draw)
        # Small talk alone would be the same text in both splits.
        if draw.split == "train" or any(turn.key for turn in document.turns):
            return document


def _any_chat(draw: Draw) -> ChatDocument:
    name, system = ASSISTANT_NAME, ""
    if draw.chance(_SYSTEM_SHARE):
        name = ASSISTANT_NAME if draw.chance(0.2) else any_name(draw)
        system = draw.one(
            [
                f"You are {name}.",
                f"You are {name}, a helpful assistant.",
                f"You are a friendly assistant. Your name is {name}.",
            ]
        )
    sections_max = draw.number(6, 14) if draw.chance(_LONG_CHAT_SHARE) else draw.number(1, 3)
    turns: list[Turn] = []
    for _ in range(sections_max):
        turns += section(draw, name)
    return ChatDocument(system, tuple(turns))


def section(draw: Draw, assistant_name: str) -> list[Turn]:
    """A few turns that belong together."""
    choice = draw.number(0, 99)
    if choice < 22:
        return [chat.arithmetic(draw) for _ in range(draw.number(1, 4))]
    if choice < 32:
        return [chat.counting(draw)]
    if choice < 48:
        return [chat.repeating(draw) for _ in range(draw.number(1, 2))]
    if choice < 54:
        return _acquaintance(draw)
    if choice < 61:
        return [chat.small_talk(draw)]
    if choice < 65:
        return [chat.asks_assistant_name(draw, assistant_name)]
    if choice < 68:
        return [chat.out_of_scope(draw)]
    first, story = chat.story_request(draw) if choice < 82 else chat.given_story(draw)
    questions = (chat.story_question(draw, story) for _ in range(draw.number(2, 5)))
    # A question asked twice in a row teaches to copy the last answer, not to read the story.
    return list(dict.fromkeys([first, *questions]))


def _acquaintance(draw: Draw) -> list[Turn]:
    turns = [chat.introduction(draw)]
    name = turns[0].fact
    if draw.chance(0.5):
        turns.append(draw.one((chat.small_talk, chat.arithmetic, chat.counting))(draw))
    if draw.chance(0.7):
        turns.append(chat.recall(draw, name))
    return turns
