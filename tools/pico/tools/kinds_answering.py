"""Kinds of tools that compute or know something: they are asked a question."""

from tools.pico import words
from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import WORD, Kind, Slot, Value, choice

_LEFT = ("a", "x", "first", "left", "n", "num1", "number1", "first_number", "one", "p")
_RIGHT = ("b", "y", "second", "right", "m", "num2", "number2", "second_number", "other", "q")
_TWO_NUMBERS = (
    Slot(_LEFT, tool_words.number, "integer", ("the first number", "first value")),
    Slot(_RIGHT, tool_words.number, "integer", ("the second number", "second value")),
)
_CITY = Slot(
    ("city", "place", "location", "town", "where", "city_name"),
    tool_words.place,
    descriptions=("name of the city", "the city", "where", "the place to ask for"),
)


def _ints(values: list[Value]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


KINDS = (
    Kind(
        "add",
        ("add", "add numbers", "sum", "plus", "calculate sum", "add two numbers", "addition", "get sum"),
        (
            "Add two numbers.",
            "Adds two integers.",
            "Return the sum of two numbers.",
            "The sum of a pair.",
            "a + b",
        ),
        _TWO_NUMBERS,
        (
            "What is {0} + {1}?",
            "What is {0} plus {1}?",
            "Add {0} and {1}.",
            "Please add {0} and {1}.",
            "{0} + {1}",
            "How much is {0} + {1}?",
            "Can you add {0} and {1}?",
            "What is the sum of {0} and {1}?",
        ),
        lambda draw, values: sum(_ints(values)),
        "{0} + {1} = {r}.",
        ("result", "sum", "value", "total"),
    ),
    Kind(
        "subtract",
        ("subtract", "minus", "difference", "subtract numbers", "get difference"),
        (
            "Subtract two numbers.",
            "Return the difference of two numbers.",
            "Take one number from another.",
            "a - b",
        ),
        _TWO_NUMBERS,
        ("What is {0} - {1}?", "What is {0} minus {1}?", "{0} - {1}", "How much is {0} minus {1}?"),
        lambda draw, values: _ints(values)[0] - _ints(values)[1],
        "{0} - {1} = {r}.",
        ("result", "difference", "value"),
    ),
    Kind(
        "multiply",
        ("multiply", "times", "product", "multiply numbers", "mul"),
        ("Multiply two numbers.", "Return the product of two numbers.", "a * b", "Multiplies two integers."),
        _TWO_NUMBERS,
        (
            "What is {0} * {1}?",
            "What is {0} times {1}?",
            "Multiply {0} by {1}.",
            "Multiply {0} and {1}.",
            "{0} * {1}",
        ),
        lambda draw, values: _ints(values)[0] * _ints(values)[1],
        "{0} * {1} = {r}.",
        ("result", "product", "value"),
    ),
    Kind(
        "weather",
        (
            "get weather",
            "weather",
            "get current weather",
            "current weather",
            "weather in city",
            "check weather",
        ),
        (
            "Get the weather of a city.",
            "Get the current weather in a given location.",
            "Current weather for a place.",
            "Returns the weather.",
            "Get current temperature for a given location.",
        ),
        (_CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "What is the weather like in {0} today?",
            "Tell me the weather in {0}.",
            "weather in {0}",
            "Is it warm in {0}?",
            "Check the weather of {0}, please.",
        ),
        lambda draw, values: draw.one(
            [
                draw.one(tool_words.WEATHER),
                f"{draw.one(tool_words.WEATHER)}, {draw.number(-9, 39)} degrees",
                f"{draw.number(-9, 39)} degrees",
                f"{draw.number(-9, 39)} C and {draw.one(tool_words.WEATHER)}",
            ]
        ),
        "The weather in {0}: {r}.",
        ("weather", "result", "forecast", "temperature", "conditions"),
    ),
    Kind(
        "weather",
        ("get weather", "get forecast", "weather forecast", "get current weather"),
        (
            "Get the weather of a city in a unit.",
            "Current weather for a place.",
            "Weather forecast for a city.",
        ),
        (
            _CITY,
            Slot(
                ("unit", "units", "scale"),
                choice("celsius", "fahrenheit"),
                choices=("celsius", "fahrenheit"),
            ),
        ),
        (
            "What is the weather in {0} in {1}?",
            "Tell me the weather in {0}, in {1}.",
            "How warm is it in {0} in {1}?",
        ),
        lambda draw, values: f"{draw.number(-9, 99)} degrees",
        "The weather in {0}: {r}.",
        ("weather", "temperature", "result"),
    ),
    Kind(
        "time",
        (
            "get time",
            "time in city",
            "current time",
            "get current time",
            "clock",
            "world clock",
            "local time",
        ),
        (
            "Get the time of a place.",
            "Current local time in a city.",
            "Tells what time it is.",
            "Returns the time.",
        ),
        (_CITY,),
        (
            "What time is it in {0}?",
            "What is the time in {0}?",
            "Tell me the time in {0}.",
            "time in {0}?",
            "What time is it in {0} now?",
        ),
        lambda draw, values: tool_words.clock(draw),
        "It is {r} in {0}.",
        ("time", "result", "now", "local_time"),
    ),
    Kind(
        "define",
        ("define", "look up", "lookup word", "dictionary", "get definition", "define word", "meaning"),
        (
            "Look up a word.",
            "Get the meaning of a word.",
            "Look a word up in the dictionary.",
            "Defines a term.",
        ),
        (WORD,),
        (
            "What does {0} mean?",
            "Look up the word {0}.",
            "Define {0}.",
            "What is the meaning of {0}?",
            'Look up "{0}".',
            "What does the word {0} mean?",
        ),
        lambda draw, values: f"a {draw.one(words.SIZES)} {tool_words.word(draw)}",
        "The word {0} means: {r}.",
        ("meaning", "definition", "result"),
    ),
    Kind(
        "translate",
        ("translate", "translate word", "translate text", "translation"),
        ("Translate a text.", "Translate words into a language.", "Translates text to another language."),
        (
            Slot(("text", "word", "words", "phrase", "sentence"), tool_words.word),
            Slot(("language", "target", "to", "lang", "into"), choice(*tool_words.LANGUAGES)),
        ),
        (
            "Translate {0} into {1}.",
            "Translate {0} to {1}.",
            "What is {0} in {1}?",
            "How do you say {0} in {1}?",
            'Translate "{0}" into {1}.',
        ),
        lambda draw, values: tool_words.made_up(draw),
        "In {1}, {0} is {r}.",
        ("translation", "text", "result"),
    ),
)
