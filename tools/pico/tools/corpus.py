"""The corpus of pico's later lessons: chats with tools, JSON objects, long beginnings, and what it knew before.

As in `corpus`, everything comes from a seed and the splits do not meet.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from tools.pico import chat, corpus
from tools.pico.chat import DO_NOT_KNOW, Turn
from tools.pico.corpus import ASSISTANT_NAME, ChatDocument, Document, StoryDocument
from tools.pico.draw import Draw, Split
from tools.pico.story import tell
from tools.pico.tools.chat import NO_TOOL, Offer, call_turn, offers, renamed, repeat_turn, unmet_turn
from tools.pico.tools.kinds import ARITHMETIC
from tools.pico.tools.objects import object_turn

_LESSONS_LEAST, _LESSONS_FALL = 0.15, 6000
# Short lessons until one more tool is offered.
_SHORT_LESSONS = 1500
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Use the tools when they help.",
    "You can call tools.",
    "You are an assistant. Call a tool if one fits, and answer by yourself if none does.",
    "Answer shortly.",
)


def documents(split: Split, seed: int, long_share: float = 0.0, long_tokens: int = 0) -> Iterator[Document]:
    """An endless stream of documents of one split; `long_share` of them begin with up to `long_tokens` tokens."""
    draw = Draw(seed, split)
    known = corpus.documents(split, seed)
    while True:
        if draw.chance(long_share):
            yield _long(draw, next(known), draw.number(long_tokens // 8, long_tokens))
            continue
        choice = draw.number(0, 99)
        if choice < 55:
            yield tool_document(draw)
        elif choice < 65:
            yield ChatDocument(_system(draw), tuple(object_turn(draw) for _ in range(draw.number(1, 3))))
        elif choice < 69:
            yield _without_tools(draw)
        else:
            yield next(known)


def name_lessons(split: Split, seed: int, share: float) -> Iterator[Document]:
    """The same without long ones, and between them lessons in copying: a `share` of all at first, then fewer."""
    draw = Draw(seed, split)
    others = documents(split, seed)
    for index in count():
        lessons_share = max(_LESSONS_LEAST, share * (1 - index / _LESSONS_FALL))
        yield _lesson(draw) if draw.chance(lessons_share) else next(others)


def short_lessons(split: Split, seed: int) -> Iterator[Document]:
    """Nothing but short chats to copy from: one tool at first, up to five in the end."""
    draw = Draw(seed, split)
    for index in count():
        choice = draw.number(0, 99)
        if choice < 8:
            yield ChatDocument("", (repeat_turn(draw),))
        elif choice < 18:
            yield ChatDocument("", (object_turn(draw),))
        else:
            tools_max = min(5, 1 + index // _SHORT_LESSONS)
            yield _short_lesson(draw, draw.number(1, tools_max))


def _short_lesson(draw: Draw, tools: int) -> ChatDocument:
    *offered, unmet = offers(draw, tools + 1)
    if draw.chance(0.4):
        offered = [renamed(draw, offer) for offer in offered]
    turns = [call_turn(draw, offer) for offer in draw.several(offered, draw.number(1, min(2, tools)))]
    if draw.chance(0.15) and unmet.kind.topic not in ARITHMETIC:
        turns.append(unmet_turn(draw, unmet, NO_TOOL))
    return ChatDocument("", tuple(turns), tuple(offer.tool for offer in offered))


def last_lessons(split: Split, seed: int, long_tokens: int) -> Iterator[Document]:
    """What the model is to do in the end: tools of any number, objects, small talk, a few long beginnings."""
    draw = Draw(seed, split)
    while True:
        choice = draw.number(0, 99)
        if choice < 62:
            yield _last_lesson(draw)
        elif choice < 72:
            yield ChatDocument(_system(draw), tuple(object_turn(draw) for _ in range(draw.number(1, 2))))
        elif choice < 78:
            yield ChatDocument("", (repeat_turn(draw),))
        elif choice < 92:
            yield ChatDocument(_system(draw), tuple(_small_talk(draw)))
        elif choice < 97:
            yield _without_tools(draw)
        else:
            lesson = _last_lesson(draw)
            tokens = draw.number(long_tokens // 8, long_tokens)
            if draw.chance(0.5):
                yield replace(lesson, system=filler(draw, tokens))
            else:
                yield replace(lesson, turns=(*history(draw, tokens), *lesson.turns))


def _last_lesson(draw: Draw) -> ChatDocument:
    tools = draw.number(1, draw.one((1, 3, 5, 8)))
    *offered, unmet = offers(draw, tools + 1)
    if draw.chance(0.2):
        offered = [renamed(draw, offer) for offer in offered]
    sums = any(offer.kind.topic in ARITHMETIC for offer in offered)
    turns: list[Turn] = []
    for _ in range(draw.number(1, 3)):
        choice = draw.number(0, 99)
        if choice < 75:
            turns.append(call_turn(draw, draw.one(offered)))
        elif choice < 89 and unmet.kind.topic not in ARITHMETIC:
            turns.append(unmet_turn(draw, unmet, NO_TOOL))
        else:
            turns += [turn for turn in _small_talk(draw) if not (sums and turn.task == "arithmetic")]
    return ChatDocument(_system(draw), tuple(turns), tuple(offer.tool for offer in offered))


def _small_talk(draw: Draw) -> list[Turn]:
    makers = (
        chat.small_talk,
        chat.small_talk,
        chat.introduction,
        chat.arithmetic,
        chat.counting,
        chat.repeating,
    )
    turns = [draw.one(makers)(draw)]
    if turns[0].task == "introduction" and draw.chance(0.6):
        turns.append(chat.recall(draw, turns[0].fact))
    if draw.chance(0.2):
        turns.append(chat.asks_assistant_name(draw, ASSISTANT_NAME))
    return turns


def tool_document(draw: Draw, tools_max: int = 8, system: str | None = None) -> ChatDocument:
    """A chat that offers one to `tools_max` tools; `system` stands before them, and is drawn if None."""
    number = draw.number(1, draw.one((2, 4, tools_max)))
    # What is not offered may still be asked for.
    *offered, unmet = offers(draw, number + 1)
    wanted = draw.several(offered, min(number, draw.number(1, 3)))
    turns: list[Turn] = []
    for _ in range(draw.number(1, 4)):
        turns += _tool_section(draw, offered, wanted, unmet)
    return ChatDocument(
        _system(draw) if system is None else system, tuple(turns), tuple(offer.tool for offer in offered)
    )


def filler(draw: Draw, tokens: int) -> str:
    """About `tokens` tokens of text that has nothing to do with what comes later."""
    parts: list[str] = []
    while sum(map(_length, parts)) < tokens:
        parts.append(tell(draw).text)
    return "\n".join(parts)


def history(draw: Draw, tokens: int) -> list[Turn]:
    """Turns of about `tokens` tokens that need no tool."""
    turns: list[Turn] = []
    while sum(_length(turn.user) + _length(turn.answer) for turn in turns) < tokens:
        made = corpus.section(draw, ASSISTANT_NAME)
        turns += [turn for turn in made if turn.task not in ("out of scope", "arithmetic")]
    return turns


def _length(text: str) -> int:
    # A word with the space before it is mostly one token.
    return text.count(" ") + 4


def _tool_section(draw: Draw, offered: list[Offer], wanted: list[Offer], unmet: Offer) -> list[Turn]:
    choice = draw.number(0, 99)
    if choice < 72:
        return [call_turn(draw, draw.one(wanted))]
    if choice < 86:
        return [unmet_turn(draw, unmet, NO_TOOL)] if unmet.kind.topic not in ARITHMETIC else []
    if choice < 90:
        return [object_turn(draw)]
    turns = corpus.section(draw, ASSISTANT_NAME)
    sums = any(offer.kind.topic in ARITHMETIC for offer in offered)
    # What no tool is offered for has an answer of its own here, and a sum is for the tool that adds.
    return [
        turn for turn in turns if turn.task != "out of scope" and not (sums and turn.task == "arithmetic")
    ]


def _lesson(draw: Draw) -> ChatDocument:
    """Names that cannot be guessed: who does not copy them from the signatures does not learn them."""
    if draw.chance(0.25):
        return ChatDocument("", tuple(repeat_turn(draw) for _ in range(draw.number(1, 3))))
    offered = [renamed(draw, offer) for offer in offers(draw, draw.number(1, 3))]
    turns = tuple(call_turn(draw, draw.one(offered)) for _ in range(draw.number(1, 3)))
    return ChatDocument(_system(draw), turns, tuple(offer.tool for offer in offered))


def _without_tools(draw: Draw) -> ChatDocument:
    """What a tool would know, asked of a model that has none."""
    asked = [offer for offer in offers(draw, 3) if offer.kind.topic not in ARITHMETIC]
    turns = [unmet_turn(draw, offer, DO_NOT_KNOW) for offer in asked]
    return ChatDocument("", tuple(turns) or (chat.arithmetic(draw),))


def _long(draw: Draw, known: Document, tokens: int) -> Document:
    """A document whose beginning has some `tokens` tokens."""
    choice = draw.number(0, 9)
    if choice < 2:
        return tool_document(draw, tools_max=4, system=filler(draw, tokens))
    if choice < 4:
        # Signatures of some 30 tokens each.
        return tool_document(draw, tools_max=max(2, min(40, tokens // 30)), system=filler(draw, tokens // 2))
    if choice < 8:
        document = tool_document(draw)
        return replace(document, turns=(*history(draw, tokens), *document.turns))
    if isinstance(known, StoryDocument):
        return known
    return ChatDocument("\n".join(part for part in (filler(draw, tokens), known.system) if part), known.turns)


def _system(draw: Draw) -> str:
    return draw.one(_SYSTEMS) if draw.chance(0.5) else ""
