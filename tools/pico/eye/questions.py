"""Questions about a scene, and the answers that it gives."""

from collections import Counter
from typing import NamedTuple

from tools.pico.draw import Draw
from tools.pico.eye.pictures import Scene

NUMBERS = ("no", "one", "two", "three", "four")


class Question(NamedTuple):
    """A question and its answer; `kind` is for the evaluation."""

    kind: str
    text: str
    answer: str


def questions_of(scene: Scene, draw: Draw, count: int) -> list[Question]:
    """`count` different questions that the scene answers, the request for a description among them."""
    every = all_questions(scene)
    described, others = every[0], every[1:]
    return [described, *draw.several(others, min(count - 1, len(others)))]


def all_questions(scene: Scene) -> list[Question]:
    """Every question that the scene answers: first that for a description."""
    found = [
        Question("describe", "What do you see?", describe(scene)),
        Question("count", "How many things are there?", f"{NUMBERS[len(scene.things)].capitalize()}."),
    ]
    kinds = Counter(thing.kind for thing in scene.things if not thing.is_digit)
    colors = Counter(thing.color for thing in scene.things)
    for kind, count in kinds.items():
        found.append(
            Question("count kind", f"How many {plural(kind)} are there?", f"{NUMBERS[count].capitalize()}.")
        )
    for thing in scene.things:
        if thing.is_digit:
            found.append(Question("digit", "Which digit do you see?", f"{thing.kind}."))
        elif kinds[thing.kind] == 1:
            found.append(
                Question("color", f"What color is the {thing.kind}?", f"{thing.color.capitalize()}.")
            )
        if colors[thing.color] == 1:
            named = "A digit." if thing.is_digit else f"A {thing.kind}."
            found.append(Question("shape", f"What is {thing.color}?", named))
    return found


def describe(scene: Scene) -> str:
    """One sentence: alike things are counted, in the order in which the first of each is seen."""
    groups = Counter((thing.kind, thing.color) for thing in scene.things)
    parts = [_named(kind, color, count) for (kind, color), count in groups.items()]
    if not parts:
        return "Nothing."
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"{text[0].upper()}{text[1:]}."


def plural(kind: str) -> str:
    """The plural of a shape's name."""
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _named(kind: str, color: str, count: int) -> str:
    noun = f"digit {kind}" if kind.isdigit() else plural(kind) if count > 1 else kind
    return f"{'a' if count == 1 else NUMBERS[count]} {color} {noun}"
