"""Kinds of tools for the home and the day: messages, clocks, lights and conversions."""

from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import TEXT, Kind, Slot, choice, said

_PERSON = Slot(("name", "person", "who", "contact", "to"), tool_words.person, descriptions=("first name",))
_MINUTES = Slot(("minutes", "duration", "time", "length", "n"), lambda draw: draw.number(1, 120), "integer")
KINDS = (
    Kind(
        "message",
        ("send message", "message", "send text", "send", "send sms"),
        ("Send a message to somebody.", "Sends a text message.", "Write a message to a person."),
        (_PERSON, TEXT),
        (
            "Send {0} the message: {1}",
            "Send a message to {0}: {1}",
            "Tell {0}: {1}",
            "Write to {0}: {1}",
            'Send "{1}" to {0}.',
        ),
        said("sent"),
        "The message to {0}: {r}.",
        ("status", "result"),
    ),
    Kind(
        "timer",
        ("set timer", "start timer", "timer", "countdown"),
        ("Set a timer.", "Start a timer of some minutes.", "Counts down the given minutes."),
        (_MINUTES,),
        (
            "Set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "Timer for {0} minutes, please.",
            "Wake me in {0} minutes.",
        ),
        said("started"),
        "The timer of {0} minutes: {r}.",
        ("status", "result"),
    ),
    Kind(
        "alarm",
        ("set alarm", "alarm", "create alarm", "wake me"),
        ("Set an alarm.", "Set the alarm clock to a time.", "Creates an alarm."),
        (Slot(("time", "at", "when", "hour"), tool_words.clock, descriptions=("as HH:MM",)),),
        ("Set an alarm for {0}.", "Wake me at {0}.", "Set the alarm to {0}.", "Alarm at {0}, please."),
        said("set"),
        "The alarm for {0}: {r}.",
        ("status", "result"),
    ),
    Kind(
        "note",
        ("add note", "write note", "save note", "remember", "create note", "add todo"),
        ("Write a note.", "Save a note for later.", "Adds a note to the list.", "Remember something."),
        (TEXT,),
        ("Write a note: {0}", "Note this: {0}", "Remember this: {0}", "Save a note: {0}", "Add a note: {0}"),
        said("saved"),
        "The note: {r}.",
        ("status", "result"),
    ),
    Kind(
        "light",
        ("set light", "switch light", "light", "turn light", "control lights"),
        ("Switch a light on or off.", "Control the light of a room.", "Turn lights on and off."),
        (
            Slot(("room", "where", "place", "location"), choice(*tool_words.ROOMS)),
            Slot(("state", "power", "mode", "status"), choice("on", "off"), choices=("on", "off")),
        ),
        (
            "Turn the light in the {0} {1}.",
            "Switch the {0} light {1}.",
            "Turn {1} the light in the {0}.",
            "Light {1} in the {0}, please.",
        ),
        said("done"),
        "The light in the {0}, {1}: {r}.",
        ("status", "result"),
    ),
    Kind(
        "convert",
        ("convert", "convert units", "unit converter", "convert unit"),
        ("Convert a number between units.", "Converts units.", "Convert a length, a weight or a time."),
        (
            Slot(("value", "amount", "number", "n"), tool_words.number, "number"),
            Slot(("from", "from_unit", "source", "unit"), choice(*tool_words.UNITS)),
            Slot(("to", "to_unit", "target", "into"), choice(*tool_words.UNITS)),
        ),
        (
            "Convert {0} {1} to {2}.",
            "Convert {0} {1} into {2}.",
            "How many {2} are {0} {1}?",
            "{0} {1} in {2}",
        ),
        lambda draw, values: tool_words.decimal(draw),
        "{0} {1} are {r} {2}.",
        ("result", "value"),
    ),
    Kind(
        "money",
        ("exchange", "convert currency", "exchange rate", "currency converter"),
        ("Convert money between currencies.", "Convert an amount of money.", "Exchange money."),
        (
            Slot(("amount", "value", "money", "sum"), tool_words.number, "number"),
            Slot(("from", "from_currency", "base", "source"), choice(*tool_words.CURRENCIES)),
            Slot(("to", "to_currency", "quote", "target"), choice(*tool_words.CURRENCIES)),
        ),
        (
            "Convert {0} {1} to {2}.",
            "How much is {0} {1} in {2}?",
            "Exchange {0} {1} into {2}.",
            "{0} {1} in {2}",
        ),
        lambda draw, values: tool_words.decimal(draw),
        "{0} {1} are {r} {2}.",
        ("result", "amount", "value"),
    ),
)
