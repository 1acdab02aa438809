"""Chats in which the system prompt offers tools: some are called, and what they answer is told."""

import json
from dataclasses import dataclass, replace
from typing import Any

from tools.pico.chat import Turn
from tools.pico.draw import Draw
from tools.pico.tool import Parameter, Tool, ToolCall
from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import Kind, Value
from tools.pico.tools.kinds import KINDS, made_up_kind

NO_TOOL = "I have no tool for that, and I do not know it myself."
_PIECES = (
    tool_words.named_thing,
    tool_words.word,
    tool_words.path,
    tool_words.clock,
    tool_words.number,
    tool_words.made_up,
    tool_words.identifier,
)
_MADE_UP_SHARE = 0.35
_OPAQUE_SHARE = 0.1
_ERROR_SHARE = 0.05


@dataclass(frozen=True)
class Offer:
    """A tool and the kind that it is of. `slots` are the places of its parameters' values in what users ask."""

    kind: Kind
    tool: Tool
    slots: tuple[int, ...]


def offers(draw: Draw, count: int) -> list[Offer]:
    """`count` tools of the draw's split, no two of one name or topic."""
    chosen: list[Offer] = []
    while len(chosen) < count:
        offer = draw.keyed(lambda: _offer(draw), lambda offer: offer.tool.key)
        if all(
            offer.tool.name != other.tool.name and offer.kind.topic != other.kind.topic for other in chosen
        ):
            chosen.append(offer)
    return chosen


def renamed(draw: Draw, offer: Offer) -> Offer:
    """The same tool, of the draw's split too, with names that tell nothing."""

    def made() -> Offer:
        names = draw.several(tool_words.PROPERTIES + tool_words.OBJECTS + tool_words.SUBJECTS, 6)
        # Nothing else would tell which is first.
        natural = sorted(zip(offer.slots, offer.tool.parameters, strict=True), key=lambda pair: pair[0])
        parameters = tuple(
            replace(parameter, name=draw.one([names[index], tool_words.made_up(draw) + str(index)]))
            for index, parameter in natural
        )
        name = draw.one(
            [_styled(draw, f"{names[4]} {names[5]}"), _opaque_name(draw), _styled(draw, names[5])]
        )
        slots = tuple(range(len(parameters)))
        return replace(offer, tool=replace(offer.tool, name=name, parameters=parameters), slots=slots)

    return draw.keyed(made, lambda offer: offer.tool.key)


def call_turn(draw: Draw, offer: Offer) -> Turn:
    """A user who asks for what a tool does, the call, its answer, and what the model makes of it."""
    return draw.keyed(lambda: _call_turn(draw, offer), lambda turn: turn.key)


def unmet_turn(draw: Draw, offer: Offer, answer: str) -> Turn:
    """A user who asks for what a tool would do that nobody offered."""
    asked = call_turn(draw, offer)
    return Turn("no tool fits", asked.user, answer, answer, asked.key)


def repeat_turn(draw: Draw) -> Turn:
    """Names, codes, paths and words to say again: whatever arguments of calls are made of."""
    return draw.keyed(lambda: _repeat_turn(draw), lambda turn: turn.key)


def _repeat_turn(draw: Draw) -> Turn:
    said = " ".join(str(draw.one(_PIECES)(draw)) for _ in range(draw.number(1, 6)))
    user = draw.one([f"Repeat after me: {said}", f"Repeat: {said}", f'Say this again: "{said}"'])
    return Turn("repeating", user, said, said, f"repeat/{said}")


def _offer(draw: Draw) -> Offer:
    kind = made_up_kind(draw) if draw.chance(_MADE_UP_SHARE) else draw.one(KINDS)
    variant = draw.number(0, 999)
    noted, all_required = draw.chance(0.35), draw.chance(0.8)
    parameters = [
        Parameter(
            # The same place in the list for each, or a pair might be called `a` and `second`.
            slot.names[variant % len(slot.names)],
            slot.kind if slot.kind != "integer" or draw.chance(0.7) else "number",
            draw.one(slot.descriptions) if noted and slot.descriptions else "",
            slot.choices,
            all_required or draw.chance(0.5),
        )
        for slot in kind.slots
    ]
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        return _offer(draw)
    slots = list(range(len(parameters)))
    if draw.chance(0.15):
        slots.reverse()
    described = draw.one(kind.descriptions) if draw.chance(0.9) else ""
    opaque = bool(described) and draw.chance(_OPAQUE_SHARE)
    name = _opaque_name(draw) if opaque else _styled(draw, draw.one(kind.names))
    return Offer(kind, Tool(name, described, tuple(parameters[slot] for slot in slots)), tuple(slots))


def _styled(draw: Draw, text: str) -> str:
    parts = text.split(" ")
    style = draw.number(0, 19)
    if style < 3:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style == 3:
        return "".join(part.capitalize() for part in parts)
    if style == 4:
        return "-".join(parts)
    if style == 5:
        return f"{draw.one(['my', 'api', 'tool', 'demo', tool_words.made_up(draw)])}_{'_'.join(parts)}"
    return "_".join(parts)


def _opaque_name(draw: Draw) -> str:
    return draw.one(
        [f"{draw.one(['tool', 'fn', 'f', 'func', 'do'])}_{draw.number(1, 99)}", tool_words.made_up(draw)]
    )


def _call_turn(draw: Draw, offer: Offer) -> Turn:
    kind, tool = offer.kind, offer.tool
    values = [slot.draw(draw) for slot in kind.slots]
    user = draw.one(kind.asks).format(*values)
    if draw.chance(0.06):
        user = draw.one(["Please use a tool. ", "Use your tools: ", "Hello! ", "Hi, "]) + user
    given = {
        parameter.name: values[slot] for parameter, slot in zip(tool.parameters, offer.slots, strict=True)
    }
    result = kind.result(draw, values)
    if draw.chance(_ERROR_SHARE):
        why = draw.one(["not found", "no connection", "not allowed", f"unknown {tool_words.word(draw)}"])
        response, reply, fact = _error(draw, why), f"The tool failed: {why}.", why
    else:
        response = _response(draw, kind, given, result)
        reply, fact = kind.reply.format(*values, r=result), str(result)
    call = ToolCall(tool.name, json.dumps(given, ensure_ascii=False), response)
    # Without a value there are too few ways to ask: the tool's own key must do.
    return Turn("tool call", user, reply, fact, f"ask/{user}" if values else tool.key, call)


def _response(draw: Draw, kind: Kind, given: dict[str, Value], result: Value) -> str:
    shape = draw.number(0, 9)
    if shape < 6:
        return str(result)
    answer: dict[str, Any] = {draw.one(kind.result_keys): result}
    if shape == 9:
        answer = {**given, **answer}
    return json.dumps(answer, ensure_ascii=False)


def _error(draw: Draw, why: str) -> str:
    return draw.one([f"error: {why}", f"Error: {why}", json.dumps({"error": why})])
