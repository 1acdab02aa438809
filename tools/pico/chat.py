"""Turns of plain chats: greetings, counting, repeating, small arithmetic, and questions about a story."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.pico import words
from tools.pico.draw import Draw
from tools.pico.story import Question, Story, any_name, tell
from tools.pico.tool import ToolCall

DO_NOT_KNOW = (
    "I am a very small model, so I do not know that. I can tell stories, count, add, and repeat words."
)


@dataclass(frozen=True)
class Turn:
    """One user message and its answer.

    `task` names what is asked for, `fact` is what a right answer must hold. An empty `key` marks small talk,
    which is the same on both sides of the split; every other turn belongs to one side by its key. With a `call`
    the model first calls that tool, and the answer tells what the tool answered.
    """

    task: str
    user: str
    answer: str
    fact: str
    key: str
    call: ToolCall | None = None


def arithmetic(draw: Draw) -> Turn:
    """A sum up to 10 + 10, a difference up to 20 - 10, or a product up to 5 * 5."""
    return _keyed(draw, _arithmetic)


def counting(draw: Draw) -> Turn:
    """Counting up or down between two numbers up to 30, or the number after or before one."""
    return _keyed(draw, lambda draw: draw.one((_count_up, _count_up, _count_down, _next_number))(draw))


def repeating(draw: Draw) -> Turn:
    """One to ten words, or a sentence, to say again."""
    return _keyed(draw, _repeating)


def plain_repeating(draw: Draw, words_max: int) -> Turn:
    """Up to `words_max` words and names to say again, always asked for in the same way."""
    return _keyed(draw, lambda draw: _plain_repeating(draw, words_max))


def introduction(draw: Draw) -> Turn:
    """A user who gives a name and is greeted by it."""
    return _keyed(draw, _introduction)


def small_talk(draw: Draw) -> Turn:
    """A greeting, thanks, a farewell, or a question about the model itself."""
    users, answer = draw.one(_SMALL_TALK)
    return Turn("small talk", draw.one(users), answer, answer, "")


def out_of_scope(draw: Draw) -> Turn:
    """Something that a model this small cannot know."""
    if draw.chance(0.7):
        user = draw.one(_OUT_OF_SCOPE)
    else:
        user = " ".join(draw.several(words.REPEATABLE, draw.number(1, 6))) + draw.one(["", "?", ".", "!"])
    return Turn("out of scope", user, DO_NOT_KNOW, DO_NOT_KNOW, "")


def story_request(draw: Draw) -> tuple[Turn, Story]:
    """A wish for a story, and the story told."""
    about = draw.number(0, 3)
    kind = draw.one(words.ANIMALS) if about in (1, 3) else None
    name = any_name(draw) if about in (2, 3) else None
    story = tell(draw, kind, name)
    article = "an" if kind and kind[0] in "aeiou" else "a"
    subject = {
        0: "",
        1: f" about {article} {kind}",
        2: f" about {name}",
        3: f" about {article} {kind} named {name}",
    }[about]
    wish = draw.one(
        [
            "Tell me a story",
            "Tell me a short story",
            "tell me a story",
            "Please tell me a story",
            "Write a story",
            "Can you tell me a story",
        ]
    )
    mark = "?" if wish.startswith("Can") else draw.one([".", "", "!"])
    return Turn("story", f"{wish}{subject}{mark}", story.text, story.hero.name, story.key), story


def story_question(draw: Draw, story: Story) -> Turn:
    """A question about a story that was told before."""
    return _asked(story, draw.one(story.questions), before="")


def given_story(draw: Draw) -> tuple[Turn, Story]:
    """A user who tells a story and asks about it."""
    story = tell(draw)
    before = draw.one(["", "Here is a story. ", "Read this story. "]) + story.text + " "
    return _asked(story, draw.one(story.questions), before), story


def recall(draw: Draw, name: str) -> Turn:
    """A user who asks for the name that was given earlier in the chat."""
    user = draw.one(["What is my name?", "Do you know my name?", "Who am I?"])
    return Turn("recall", user, f"Your name is {name}.", name, "")


def asks_assistant_name(draw: Draw, name: str) -> Turn:
    """A user who asks an assistant what it is called."""
    user = draw.one(["What is your name?", "Who are you?", "What are you called?"])
    return Turn("own name", user, f"My name is {name}.", name, "")


def _asked(story: Story, question: Question, before: str) -> Turn:
    return Turn("question", before + question.text, question.answer, question.fact, story.key)


def _keyed(draw: Draw, make: Callable[[Draw], Turn]) -> Turn:
    return draw.keyed(lambda: make(draw), lambda turn: turn.key)


def _arithmetic(draw: Draw) -> Turn:
    kind = draw.number(0, 9)
    if kind < 5:
        left, right = draw.number(0, 10), draw.number(0, 10)
        sign, word, result = "+", "plus", left + right
    elif kind < 9:
        right = draw.number(0, 10)
        left = right + draw.number(0, 10)
        sign, word, result = "-", "minus", left - right
    else:
        left, right = draw.number(0, 5), draw.number(0, 5)
        sign, word, result = "*", "times", left * right
    user = draw.one(
        [
            f"What is {left} {sign} {right}?",
            f"What is {left} {word} {right}?",
            f"{left} {sign} {right} = ?",
            f"{left} {sign} {right}",
            f"{left}{sign}{right}",
            f"{left}{sign}{right}=?",
            f"what is {left} {sign} {right}",
            f"What is {left}{sign}{right}?",
            f"How much is {left} {sign} {right}?",
            f"How much is {left} {word} {right}?",
            f"Please tell me {left} {sign} {right}.",
        ]
    )
    return Turn(
        "arithmetic", user, f"{left} {sign} {right} = {result}.", f"= {result}.", f"arithmetic/{user}"
    )


def _count_up(draw: Draw) -> Turn:
    first = draw.number(0, 20) if draw.chance(0.6) else 1
    last = first + draw.number(2, 10)
    user = draw.one([f"Count from {first} to {last}.", f"Please count from {first} to {last}."])
    if first == 1:
        user = draw.one([user, f"Count to {last}.", f"Can you count to {last}?"])
    answer = ", ".join(str(number) for number in range(first, last + 1)) + "."
    return Turn("counting", user, answer, answer, f"count/{user}")


def _count_down(draw: Draw) -> Turn:
    last = draw.number(0, 10)
    first = last + draw.number(2, 10)
    user = draw.one([f"Count down from {first} to {last}.", f"Please count down from {first} to {last}."])
    answer = ", ".join(str(number) for number in range(first, last - 1, -1)) + "."
    return Turn("counting", user, answer, answer, f"count/{user}")


def _next_number(draw: Draw) -> Turn:
    number, side = draw.number(1, 30), draw.one(["after", "before"])
    user = draw.one([f"What number comes {side} {number}?", f"Which number is {side} {number}?"])
    result = number + 1 if side == "after" else number - 1
    return Turn("counting", user, f"{result} comes {side} {number}.", f"{result} comes", f"count/{user}")


def _repeating(draw: Draw) -> Turn:
    if draw.chance(0.25):
        said = draw.one(tell(draw).text.replace('"', "").split(". "))
    else:
        said = " ".join(draw.several(words.REPEATABLE, draw.number(1, 10)))
    if draw.chance(0.15):
        said = f"{any_name(draw)} {said}"
    user = draw.one(
        [
            f"Repeat after me: {said}",
            f"Please repeat: {said}",
            f"Repeat: {said}",
            f"repeat after me: {said}",
            f"Say this again: {said}",
            f'Repeat these words: "{said}"',
        ]
    )
    return Turn("repeating", user, said, said, f"repeat/{said}")


def _plain_repeating(draw: Draw, words_max: int) -> Turn:
    said = " ".join(draw.one(_COPIED) for _ in range(draw.number(1, words_max)))
    return Turn("repeating", f"Repeat after me: {said}", said, said, f"repeat/{said}")


def _introduction(draw: Draw) -> Turn:
    name = any_name(draw)
    user = draw.one(
        [
            f"My name is {name}.",
            f"Hello, my name is {name}.",
            f"Hi, I am {name}.",
            f"Hello! I am {name}.",
            f"Hi! My name is {name}!",
        ]
    )
    answer = f"Hello, {name}! It is nice to meet you."
    return Turn("introduction", user, answer, name, f"introduction/{user}")


_COPIED = (*words.REPEATABLE, *words.NAMES)

_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hi", "Hi!", "Hello", "Hello!", "hello", "hi", "Hey", "Hello there!"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good night!"), "Good evening! How can I help you?"),
    (("How are you?", "Hello, how are you?", "how are you"), "I am fine, thank you. How are you?"),
    (("I am fine.", "I am good.", "I feel happy."), "I am glad to hear that."),
    (("Thank you!", "Thanks!", "Thank you very much."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you soon!", "Bye"), "Goodbye! Have a nice day."),
    (
        ("What can you do?", "Can you help me?", "Help"),
        "I can tell stories, count, add small numbers, repeat words, and answer questions about a story.",
    ),
    (("I am sad.", "I feel sad."), "I am sorry to hear that. Do you want to hear a story?"),
)

_OUT_OF_SCOPE = (
    "What is the capital of France?",
    "Who wrote this book?",
    "What is the weather today?",
    "How far is the moon?",
    "Why is the sky blue?",
    "Write a program in Python.",
    "What time is it?",
    "Who is the president?",
    "Explain how an engine works.",
    "Translate this into German.",
    "What is the meaning of life?",
    "How do planes fly?",
    "Write a poem about love.",
    "What is a neural network?",
    "How old are you?",
    "Where do you live?",
    "Can you sing a song?",
    "What should I eat today?",
    "How does a computer work?",
    "Give me a list of ideas.",
    "What is the biggest city in the world?",
    "Summarize the news.",
    "When did the war end?",
    "Which language is best?",
)
