"""Short stories with a want, a problem, some help and an end, and questions that each story answers."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.pico import words
from tools.pico.draw import Draw


@dataclass(frozen=True)
class Character:
    """Somebody in a story: a name, how to introduce it ("a little fox") and its pronouns."""

    name: str
    kind: str
    size: str
    he: str
    his: str
    him: str

    @property
    def introduction(self) -> str:
        return f"a {self.size} {self.kind}"


@dataclass(frozen=True)
class Question:
    """A question about a story, the sentence that answers it, and the words that a right answer holds."""

    text: str
    answer: str
    fact: str


@dataclass(frozen=True)
class Plot:
    """What happens between the introduction and the end of a story."""

    name: str
    thing: str
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Story:
    """A story of 60 to 150 tokens, who and what it is about, and what can be asked about it."""

    text: str
    hero: Character
    helper: Character
    plot: str
    thing: str
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """What decides the split: no hero meets the same plot and thing on both sides of it."""
        return f"story/{self.hero.name}/{self.hero.kind}/{self.plot}/{self.thing}"


def tell(draw: Draw, kind: str | None = None, name: str | None = None) -> Story:
    """A story from the draw's split; `kind` ("fox") and `name` ("Mia") choose its hero."""
    return draw.keyed(lambda: _compose(draw, kind, name), lambda story: story.key)


def _compose(draw: Draw, kind: str | None, name: str | None) -> Story:
    hero = _character(draw, kind, name, avoid="")
    helper = _character(draw, None, None, avoid=hero.name)
    plot = draw.one(_PLOTS)(draw, hero, helper)
    ending, feeling = _ending(draw, hero, helper)
    opening, middle = _opening(draw, hero), " ".join(plot.sentences)
    if opening.startswith("One day"):
        middle = middle.replace("One day,", "That day,", 1)
    text = " ".join([opening, middle, ending])
    questions = (
        *plot.questions,
        Question(f"Who helped {hero.name}?", f"{helper.name} helped {hero.name}.", helper.name),
        Question("Who is the story about?", f"The story is about {hero.name}.", hero.name),
        Question(f"Who was {helper.name}?", f"{helper.name} was {helper.introduction}.", helper.kind),
        Question(f"Who was {hero.name}?", f"{hero.name} was {hero.introduction}.", hero.kind),
        Question(f"How did {hero.name} feel in the end?", f"{hero.name} felt {feeling}.", feeling),
    )
    return Story(text, hero, helper, plot.name, plot.thing, questions)


def _character(draw: Draw, kind: str | None, name: str | None, avoid: str) -> Character:
    if name is None:
        name = any_name(draw, avoid)
    boy = name in words.BOYS or (name not in words.GIRLS and draw.chance(0.5))
    person = "boy" if boy else "girl"
    if kind is None:
        kind = person if draw.chance(0.5) else draw.one(words.ANIMALS)
    pronouns = ("he", "his", "him") if boy else ("she", "her", "her")
    return Character(name, kind, draw.one(words.SIZES), *pronouns)


def any_name(draw: Draw, avoid: str = "") -> str:
    """A common name, or now and then a made-up one; never `avoid`."""
    if draw.chance(0.1):
        return "".join(draw.several(words.SYLLABLES, draw.number(2, 3))).capitalize()
    return draw.one([known for known in words.NAMES if known != avoid])


def _opening(draw: Draw, hero: Character) -> str:
    home = draw.one(words.HOMES)
    who = hero.introduction
    return draw.one(
        [
            f"Once upon a time, there was {who} named {hero.name}.",
            f"Once upon a time there was {who} named {hero.name}. {hero.he.capitalize()} lived {home}.",
            f"Once upon a time, there was {who} named {hero.name}. {hero.name} lived {home}.",
            f"Once upon a time, {who} named {hero.name} lived {home}.",
            f"Once upon a time {home}, there lived {who} named {hero.name}.",
            f"There was once {who} named {hero.name}, who lived {home}.",
            f"{hero.name} was {who} who lived {home}.",
            f"Long ago, {who} named {hero.name} lived {home}.",
            f"{home.capitalize()} lived {who} named {hero.name}.",
            f"One day, {who} named {hero.name} went out to play.",
            f"A {hero.size} {hero.kind} named {hero.name} lived {home}.",
            f"The {hero.size} {hero.kind} was called {hero.name} and lived {home}.",
            f"This is the story of {who} named {hero.name}.",
            f"{hero.name} the {hero.kind} was {hero.size}. {hero.he.capitalize()} lived {home}.",
        ]
    )


def _ending(draw: Draw, hero: Character, helper: Character) -> tuple[str, str]:
    feeling = draw.one(["happy", "proud", "glad", "calm", "thankful"])
    thanks = draw.one(
        [
            f'"Thank you, {helper.name}!" said {hero.name}.',
            f"{hero.name} thanked {helper.name}.",
            f"{hero.name} gave {helper.name} a big hug.",
            f'"You are a good friend," said {hero.name}.',
        ]
    )
    close = draw.one(
        [
            "From that day on, they were best friends.",
            "Then they played together until the sun went down.",
            "They laughed and walked home together.",
            "That night, they both slept well.",
            "And they lived happily ever after.",
        ]
    )
    return f"{thanks} {hero.name} felt very {feeling}. {close}", feeling


def _meeting(draw: Draw, helper: Character) -> str:
    return draw.one(
        [
            f"Then {helper.name}, {helper.introduction}, came by.",
            f"Just then, {helper.introduction} named {helper.name} walked by.",
            f"Soon {helper.introduction} named {helper.name} came along.",
        ]
    )


def _offer(draw: Draw, helper: Character) -> str:
    return draw.one(
        [
            f'"Do not worry, I can help you," said {helper.name}.',
            f'"Let me help you," said {helper.name}.',
            f'{helper.name} asked, "What is wrong?"',
            f"{helper.name} wanted to help.",
        ]
    )


def _sadness(draw: Draw, hero: Character) -> str:
    return draw.one(
        [
            f"{hero.name} was very sad.",
            f"{hero.name} began to cry.",
            f"{hero.name} did not know what to do.",
            f'"Oh no!" said {hero.name}.',
        ]
    )


def _lost(draw: Draw, hero: Character, helper: Character) -> Plot:
    color, toy = draw.one(words.COLORS), draw.one(words.TOYS)
    wrong_place, place = draw.several(words.HIDING_PLACES, 2)
    sentences = (
        draw.one(
            [
                f"One day, {hero.name} wanted to play with {hero.his} {color} {toy}, but it was lost.",
                f"{hero.name} had a {color} {toy}. One morning, the {toy} was gone.",
                f"One day, {hero.name} lost {hero.his} {color} {toy}.",
            ]
        ),
        f"{hero.name} looked {wrong_place}, but it was not there.",
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"They looked everywhere. At last, {helper.name} found the {toy} {place}.",
    )
    questions = (
        Question(f"What did {hero.name} lose?", f"{hero.name} lost a {color} {toy}.", f"{color} {toy}"),
        Question(f"Where was the {toy}?", f"The {toy} was {place}.", place),
        Question(f"Who found the {toy}?", f"{helper.name} found the {toy}.", helper.name),
        Question(f"What color was the {toy}?", f"The {toy} was {color}.", color),
    )
    return Plot("lost", f"{color} {toy}", sentences, questions)


def _stuck(draw: Draw, hero: Character, helper: Character) -> Plot:
    color, toy = draw.one(words.COLORS), draw.one(words.TOYS)
    place, tool = draw.one(words.HIGH_PLACES), draw.one(words.REACHING_TOOLS)
    sentences = (
        draw.one(
            [
                f"One day, {hero.name} was playing with a {color} {toy}. "
                f"The wind blew, and the {toy} got stuck {place}.",
                f"One windy day, {hero.his} {color} {toy} flew up and got stuck {place}.",
            ]
        ),
        draw.one(
            [
                f"{hero.name} jumped and jumped, but {hero.he} was too short.",
                f"{hero.name} tried to reach it, but it was too high.",
            ]
        ),
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} brought {tool}, and soon {hero.name} had the {toy} again.",
    )
    questions = (
        Question(f"Where was the {toy} stuck?", f"The {toy} was stuck {place}.", place),
        Question(f"What did {helper.name} bring?", f"{helper.name} brought {tool}.", tool),
        Question(f"What color was the {toy}?", f"The {toy} was {color}.", color),
    )
    return Plot("stuck", f"{color} {toy}", sentences, questions)


def _broken(draw: Draw, hero: Character, helper: Character) -> Plot:
    color, toy, tool = draw.one(words.COLORS), draw.one(words.TOYS), draw.one(words.MENDING_TOOLS)
    sentences = (
        draw.one(
            [
                f"{hero.name} loved {hero.his} {color} {toy} very much.",
                f"{hero.name} had a {color} {toy} and took it everywhere.",
            ]
        ),
        draw.one(
            [
                f"One day, {hero.name} fell down and the {toy} broke.",
                f"One day, the {toy} fell on the floor and broke.",
            ]
        ),
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} used {tool} to fix it. Soon the {toy} was as good as new.",
    )
    questions = (
        Question("What broke?", f"The {color} {toy} broke.", f"{color} {toy}"),
        Question(f"What did {helper.name} use?", f"{helper.name} used {tool}.", tool),
        Question(f"Who fixed the {toy}?", f"{helper.name} fixed the {toy}.", helper.name),
    )
    return Plot("broken", f"{color} {toy}", sentences, questions)


def _cooking(draw: Draw, hero: Character, helper: Character) -> Plot:
    food, missing = draw.one(words.FOODS), draw.one(words.MISSING_FOODS)
    dish = food.split()[-1]
    sentences = (
        draw.one(
            [
                f"One day, {hero.name} wanted to make {food}.",
                f"{hero.name} was hungry and wanted to make {food}.",
            ]
        ),
        f"{hero.he.capitalize()} looked in the kitchen, but {hero.he} needed {missing}.",
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} gave {hero.him} {missing}. They made the {dish} and ate it together.",
    )
    questions = (
        Question(f"What did {hero.name} want to make?", f"{hero.name} wanted to make {food}.", food),
        Question(f"What did {hero.name} need?", f"{hero.name} needed {missing}.", missing),
        Question(f"What did {helper.name} give?", f"{helper.name} gave {missing}.", missing),
    )
    return Plot("cooking", f"{food} with {missing}", sentences, questions)


def _planting(draw: Draw, hero: Character, helper: Character) -> Plot:
    plant = draw.one(words.PLANTS)
    flower = plant.split()[-1]
    container = draw.one(words.COLORS)
    sentences = (
        f"One day, {hero.name} wanted to grow {plant}.",
        f"{hero.name} put a seed in the ground, but the ground was too dry, and nothing grew.",
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} had a {container} bucket full of water. Every day they gave the seed some water, "
        f"and soon the {flower} grew tall.",
    )
    questions = (
        Question(f"What did {hero.name} want to grow?", f"{hero.name} wanted to grow {plant}.", plant),
        Question("What color was the bucket?", f"The bucket was {container}.", container),
        Question(
            f"What did {helper.name} have?", f"{helper.name} had a {container} bucket.", f"{container} bucket"
        ),
    )
    return Plot("planting", plant, sentences, questions)


def _fear(draw: Draw, hero: Character, helper: Character) -> Plot:
    place, gift = draw.one(words.SCARY_PLACES), draw.one(words.COURAGE_GIFTS)
    treasure = f"{draw.one(words.COLORS)} {draw.one(words.TOYS)}"
    sentences = (
        f"One day, {hero.name} wanted to look inside {place}.",
        f"But it was very dark, and {hero.he} was afraid.",
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} gave {hero.him} {gift}, and they went in together. Inside, they found a {treasure}.",
    )
    questions = (
        Question(f"What was {hero.name} afraid of?", f"{hero.name} was afraid of {place}.", place),
        Question(f"What did {helper.name} give?", f"{helper.name} gave {gift}.", gift),
        Question("What did they find?", f"They found a {treasure}.", treasure),
    )
    return Plot("fear", treasure, sentences, questions)


def _journey(draw: Draw, hero: Character, helper: Character) -> Plot:
    place, vehicle, color = draw.one(words.FAR_PLACES), draw.one(words.VEHICLES), draw.one(words.COLORS)
    ride = vehicle.split()[-1]
    sentences = (
        draw.one(
            [
                f"One day, {hero.name} wanted to go to {place}.",
                f"{hero.name} had a dream. {hero.he.capitalize()} wanted to see {place}.",
            ]
        ),
        draw.one(
            [
                f"The way was long, and soon {hero.name} was too tired to walk.",
                f"But the bridge was broken, and {hero.he} could not go on.",
            ]
        ),
        _sadness(draw, hero),
        _meeting(draw, helper),
        _offer(draw, helper),
        f"{helper.name} had a {color} {ride}. They went to {place} in the {ride}.",
    )
    questions = (
        Question(f"Where did {hero.name} want to go?", f"{hero.name} wanted to go to {place}.", place),
        Question(f"What did {helper.name} have?", f"{helper.name} had a {color} {ride}.", f"{color} {ride}"),
    )
    return Plot("journey", f"{place} by {color} {ride}", sentences, questions)


_PLOTS: tuple[Callable[[Draw, Character, Character], Plot], ...] = (
    _lost,
    _stuck,
    _broken,
    _cooking,
    _planting,
    _fear,
    _journey,
)
