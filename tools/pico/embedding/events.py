"""Events of pico's stories, and many ways to tell each, or to ask for it."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.pico import words
from tools.pico.draw import Draw
from tools.pico.embedding.synonyms import kind, same
from tools.pico.story import any_name


@dataclass(frozen=True)
class Who:
    """Somebody in an event: a name, or a kind such as "fox", and how to speak of them."""

    name: str
    animal: str
    he: str
    his: str

    def told(self, draw: Draw) -> str:
        """As a subject: by name, by kind, or by both."""
        size = same(draw, "little") if draw.chance(0.3) else ""
        plain = f"{size} {self.animal}".strip()
        return draw.one(
            [
                self.name,
                f"the {plain}",
                f"a {plain}",
                f"{self.name} the {self.animal}",
                f"a {plain} named {self.name}",
            ]
        )


@dataclass(frozen=True)
class Event:
    """One thing that happens: its key says what it is, `tell` gives a sentence, `ask` a question that it answers."""

    key: str
    tell: Callable[[Draw], str]
    ask: Callable[[Draw], str]


def any_event(draw: Draw) -> Event:
    """An event of the draw's split."""
    return draw.keyed(lambda: draw.one(_EVENTS)(draw), lambda event: event.key)


def _who(draw: Draw) -> Who:
    name = any_name(draw)
    boy = name in words.BOYS or (name not in words.GIRLS and draw.chance(0.5))
    animal = draw.one(words.ANIMALS) if draw.chance(0.6) else ("boy" if boy else "girl")
    return Who(name, animal, *(("he", "his") if boy else ("she", "her")))


def _thing(draw: Draw) -> tuple[str, str]:
    return draw.one(words.COLORS), draw.one(words.TOYS)


def _lost(draw: Draw) -> Event:
    who, (color, toy), place = _who(draw), _thing(draw), draw.one(words.HIDING_PLACES)

    def tell(draw: Draw) -> str:
        lost, found, looked = same(draw, "lost"), same(draw, "found"), same(draw, "looked")
        subject = who.told(draw)
        return draw.one(
            [
                f"{subject} {lost} {who.his} {color} {toy}.",
                f"The {color} {toy} of {subject} was gone, and it lay {place}.",
                f"{subject} {looked} everywhere for the {color} {toy}.",
                f"At last somebody {found} the {color} {toy} {place}.",
                f"Where is my {color} {toy}? asked {subject}. It was {place}.",
                f"{subject} {lost} a {kind(draw, 'toy')}: the {color} {toy}. They {found} it {place}.",
                f"The missing {toy} was {place}. It belonged to {subject}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"What did {who.told(draw)} lose?",
                f"Where was the {color} {toy}?",
                f"Who {same(draw, 'lost')} a {color} {toy}?",
                f"Which {kind(draw, 'toy')} of {who.told(draw)} is missing?",
                f"a {toy} that was gone and lay {place}",
                f"Did anybody find the {toy} of {who.name}?",
            ]
        )

    return Event(f"lost/{who}/{color}/{toy}/{place}", tell, ask)


def _stuck(draw: Draw) -> Event:
    who, (color, toy), place = _who(draw), _thing(draw), draw.one(words.HIGH_PLACES)
    tool = draw.one(words.REACHING_TOOLS)

    def tell(draw: Draw) -> str:
        subject, stuck = who.told(draw), same(draw, "stuck")
        return draw.one(
            [
                f"The {color} {toy} was {stuck} {place}.",
                f"One {same(draw, 'windy')} day, the {color} {toy} of {subject} flew up {place}.",
                f"{subject} could not reach {who.his} {color} {toy}, which was {place}.",
                f"With {tool}, {subject} got the {toy} down again.",
                f"{subject} was too short to get the {color} {toy}, but {tool} {same(draw, 'helped')} them.",
                f"The wind blew the {toy} away from {subject}, and now it is {stuck} {place}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"Where was the {toy} {same(draw, 'stuck')}?",
                f"What did the wind take from {who.told(draw)}?",
                f"How did {who.name} get the {toy} back?",
                f"a {kind(draw, 'toy')} up high that {who.name} cannot reach",
                f"Who used {tool} for a {toy}?",
            ]
        )

    return Event(f"stuck/{who}/{color}/{toy}/{place}/{tool}", tell, ask)


def _broken(draw: Draw) -> Event:
    who, (color, toy), tool = _who(draw), _thing(draw), draw.one(words.MENDING_TOOLS)

    def tell(draw: Draw) -> str:
        subject, broke, fixed = who.told(draw), same(draw, "broke"), same(draw, "fixed")
        return draw.one(
            [
                f"The {color} {toy} of {subject} {broke}.",
                f"{subject} dropped the {color} {toy} on the floor, and it {broke}.",
                f"{subject} {fixed} the {color} {toy} with {tool}.",
                f"With {tool}, the {toy} was as good as new, and {subject} was {same(draw, 'happy')}.",
                f"When the {toy} {broke}, {subject} was {same(draw, 'sad')}.",
                f"{tool} {same(draw, 'helped')} to have the {color} {toy} {fixed}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"What {same(draw, 'broke')}?  The {kind(draw, 'toy')} of {who.name}?",
                f"Who {same(draw, 'fixed')} the {color} {toy}?",
                f"How was the {toy} {same(draw, 'fixed')}?",
                f"a broken {toy} and {tool}",
                f"Why was {who.told(draw)} {same(draw, 'sad')} about a {toy}?",
            ]
        )

    return Event(f"broken/{who}/{color}/{toy}/{tool}", tell, ask)


def _cooking(draw: Draw) -> Event:
    who, food, missing = _who(draw), draw.one(words.FOODS), draw.one(words.MISSING_FOODS)
    dish = food.split()[-1]

    def tell(draw: Draw) -> str:
        subject, needed, cook = who.told(draw), same(draw, "needed"), same(draw, "cook")
        friend, gave = same(draw, "friend"), same(draw, "gave")
        return draw.one(
            [
                f"{subject} wanted to {cook} {food}.",
                f"{subject} {needed} {missing} for the {dish}.",
                f"A {friend} {gave} {subject} {missing}, and they {same(draw, 'ate')} {dish}.",
                f"In the kitchen, {subject} {needed} {missing}.",
                f"{subject} was hungry, so {who.he} began to {cook} {food} with {missing}.",
                f"There was no {missing.split()[-1]} in the house, and {subject} could not {cook} {food}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"What did {who.told(draw)} want to {same(draw, 'cook')}?",
                f"What did {who.name} need for the {dish}?",
                f"Who is hungry and makes {food}?",
                f"{kind(draw, 'food')} with {missing}",
                f"What was {who.name} short of in the kitchen?",
            ]
        )

    return Event(f"cooking/{who}/{food}/{missing}", tell, ask)


def _planting(draw: Draw) -> Event:
    who, plant, color = _who(draw), draw.one(words.PLANTS), draw.one(words.COLORS)
    flower = plant.split()[-1]

    def tell(draw: Draw) -> str:
        subject, grow = who.told(draw), same(draw, "grow")
        return draw.one(
            [
                f"{subject} wanted to {grow} {plant}.",
                f"{subject} put the seed of {plant} in the ground.",
                f"With water from a {color} bucket, the {flower} of {subject} grew tall.",
                f"The ground was too dry for the {flower}, so {subject} needed water.",
                f"Every day {subject} gave the {flower} some water, and soon it was tall.",
                f"In the garden of {subject} there is {plant}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"What did {who.told(draw)} want to {same(draw, 'grow')}?",
                f"Who has {plant} in the garden?",
                f"What grew tall because of the {color} bucket of water?",
                f"{kind(draw, 'plant')} that needs water",
                f"Why did the {flower} not grow?",
            ]
        )

    return Event(f"planting/{who}/{plant}/{color}", tell, ask)


def _fear(draw: Draw) -> Event:
    who, place, gift = _who(draw), draw.one(words.SCARY_PLACES), draw.one(words.COURAGE_GIFTS)

    def tell(draw: Draw) -> str:
        subject, afraid = who.told(draw), same(draw, "afraid")
        return draw.one(
            [
                f"{subject} was {afraid} of {place}.",
                f"It was very {same(draw, 'dark')} inside {place}, and {subject} was {afraid}.",
                f"{subject} did not want to look into {place} alone.",
                f"With {gift}, {subject} was brave and went into {place}.",
                f"A {same(draw, 'friend')} {same(draw, 'gave')} {gift} to {subject}, who was {afraid}.",
                f"{subject} shook with fear at {place}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"What was {who.told(draw)} {same(draw, 'afraid')} of?",
                f"Who was {same(draw, 'afraid')} of {place}?",
                f"Who went into {place}?",
                f"somebody who is brave because of {gift}",
                f"Why did {who.name} need {gift}?",
            ]
        )

    return Event(f"fear/{who}/{place}/{gift}", tell, ask)


def _journey(draw: Draw) -> Event:
    who, place, color = _who(draw), draw.one(words.FAR_PLACES), draw.one(words.COLORS)
    vehicle = draw.one(words.VEHICLES).split()[-1]

    def tell(draw: Draw) -> str:
        subject, go = who.told(draw), same(draw, "go")
        return draw.one(
            [
                f"{subject} wanted to {go} {place}.",
                f"The way to {place} was long, and {subject} was too {same(draw, 'tired')} to walk.",
                f"In a {color} {vehicle}, {subject} came to {place}.",
                f"The bridge was broken, so {subject} took the {vehicle} to {place}.",
                f"{subject} dreamed of {place} and went there by {vehicle}.",
                f"A {color} {vehicle} took {subject} all the way to {place}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"Where did {who.told(draw)} want to go?",
                f"How did {who.name} {same(draw, 'go')} {place}?",
                f"Who went to {place}?",
                f"a long way in a {color} {vehicle}",
                f"Which {kind(draw, 'vehicle')} did {who.told(draw)} take?",
            ]
        )

    return Event(f"journey/{who}/{place}/{color}/{vehicle}", tell, ask)


def _feeling(draw: Draw) -> Event:
    who, feeling, home = _who(draw), draw.one(["sad", "happy", "tired", "afraid"]), draw.one(words.HOMES)

    def tell(draw: Draw) -> str:
        subject, felt = who.told(draw), same(draw, feeling)
        return draw.one(
            [
                f"{subject} felt very {felt}.",
                f"{subject} was {felt}, and lived {home}.",
                f"Today {subject} is {felt}.",
                f"{home}, {subject} sat and was {felt}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"How does {who.told(draw)} feel?",
                f"Who is {same(draw, feeling)}?",
                f"Is {who.name} {same(draw, feeling)}?",
            ]
        )

    return Event(f"feeling/{who}/{feeling}/{home}", tell, ask)


def _friendship(draw: Draw) -> Event:
    who, other = _who(draw), _who(draw)

    def tell(draw: Draw) -> str:
        subject, helper = who.told(draw), other.told(draw)
        return draw.one(
            [
                f"{helper} {same(draw, 'helped')} {subject}.",
                f"{subject} {same(draw, 'thanked')} {helper}.",
                f"{subject} and {helper} played together until the sun went down.",
                f"{subject} gave {helper} a big hug, for they were best friends.",
                f"{helper} was a good {same(draw, 'friend')} of {subject}.",
            ]
        )

    def ask(draw: Draw) -> str:
        return draw.one(
            [
                f"Who {same(draw, 'helped')} {who.told(draw)}?",
                f"Who is the {same(draw, 'friend')} of {who.name}?",
                f"Whom did {other.name} {draw.one(['help', 'assist', 'support'])}?",
                f"two friends, {who.animal} and {other.animal}",
            ]
        )

    return Event(f"friends/{who}/{other}", tell, ask)


_EVENTS: tuple[Callable[[Draw], Event], ...] = (
    _lost, _stuck, _broken, _cooking, _planting, _fear, _journey, _feeling, _friendship,
)  # fmt: skip
