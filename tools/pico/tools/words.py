"""The words that tools, what is asked of them and what they answer are made of."""

from tools.pico import words
from tools.pico.draw import Draw
from tools.pico.story import any_name, tell


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    """
    Paris London Berlin Rome Madrid Oslo Vienna Lisbon Athens Dublin Prague Warsaw Tokyo Cairo Delhi Boston
    Chicago Denver Seattle Toronto Sydney Lima Quito Nairobi Lagos Accra Seoul Beijing Hanoi Manila Jakarta
    Helsinki Stockholm Copenhagen Budapest Zurich Geneva Munich Hamburg Milan Naples Turin Porto Seville Lyon
    Nice Krakow Riga Tallinn Vilnius Kyiv Istanbul Tehran Baghdad Mumbai Osaka Kyoto Perth Havana Bogota
    Austin Dallas Houston Miami Montreal Bergen Ghent Basel Leeds York Bath Graz
    """
)
COUNTRIES = _words(
    """
    France Germany Italy Spain Norway Sweden Poland Portugal Greece Ireland Japan China India Egypt Kenya
    Nigeria Ghana Peru Chile Brazil Canada Mexico Cuba Australia Finland Denmark Austria Hungary Turkey Iran
    Vietnam Thailand Morocco Iceland
    """
)
LANGUAGES = _words("German French Spanish Italian Polish Greek Dutch Japanese Turkish Swedish")
CURRENCIES = _words("USD EUR GBP JPY CHF SEK PLN INR CAD AUD")
UNITS = _words("meters feet miles inches yards grams pounds ounces liters cups hours minutes seconds days")
ROOMS = ("kitchen", "bedroom", "bathroom", "garden", "hall", "office", "garage", "cellar", "living room")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "dry", "wet")
SUBJECTS = _words(
    "cats trains music space history chess tea bees ships gold salt maps art bread tigers rivers"
)
EXTENSIONS = _words("txt md py json csv html log")
STEMS = _words(
    """
    notes main report readme todo list data test index plan letter config song story draft table setup result
    """
)
FOLDERS = _words("src docs home tmp work music photos tests build lib backup")

# What a made-up tool tells of a made-up kind of thing.
PROPERTIES = _words(
    """
    price color size weight height age status owner address phone email title author code level score length
    width depth speed rank balance birthday capital population currency language climate history meaning origin
    opposite plural rating genre flavor shape material temperature distance location position password version
    mood number name type group leader teacher doctor manager winner date year month budget salary strength
    power energy charge signal value cost tax discount stock quantity deadline schedule summary recipe
    """
)
OBJECTS = _words(
    """
    product user city country book movie song animal plant person team player order ticket account device
    server file project task company student employee customer room house car train flight ship planet star
    river mountain island bridge museum restaurant hotel shop machine robot sensor printer game card
    """
)
FETCH_VERBS = _words("get find fetch lookup show read check query load tell")

_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"


def made_up(draw: Draw) -> str:
    """A lower-case word that hardly anybody has written before."""
    return "".join(draw.several(words.SYLLABLES, draw.number(2, 3)))


def place(draw: Draw) -> str:
    """A city, or something that sounds like one."""
    if draw.chance(0.25):
        head = draw.one(["", "", "", "New ", "Port ", "San ", "North "])
        return head + made_up(draw).capitalize()
    return draw.one(CITIES)


def person(draw: Draw) -> str:
    """A first name."""
    return made_up(draw).capitalize() if draw.chance(0.15) else any_name(draw)


def word(draw: Draw) -> str:
    """A plain word, known or made up."""
    if draw.chance(0.25):
        return made_up(draw)
    return draw.one(draw.one((words.REPEATABLE, PROPERTIES, OBJECTS, SUBJECTS)))


def phrase(draw: Draw) -> str:
    """A few words, or a sentence out of a story without its full stop."""
    if draw.chance(0.3):
        sentences = tell(draw).text.replace('"', "").rstrip(".").split(". ")
        short = [sentence for sentence in sentences if len(sentence.split()) <= 9]
        if short:
            return draw.one(short)
    return " ".join(word(draw) for _ in range(draw.number(1, 5)))


def path(draw: Draw) -> str:
    """The name of a file, sometimes in a folder."""
    stem = made_up(draw) if draw.chance(0.2) else draw.one(STEMS)
    name = f"{stem}.{draw.one(EXTENSIONS)}"
    return f"{draw.one(FOLDERS)}/{name}" if draw.chance(0.35) else name


def number(draw: Draw) -> int:
    """A whole number of one to four digits."""
    return draw.number(0, draw.one((9, 99, 999, 9999)))


def decimal(draw: Draw) -> float:
    """A number with a digit after the point that is not zero."""
    return draw.number(0, 99) + draw.number(1, 9) / 10


def clock(draw: Draw) -> str:
    """A time of day."""
    return f"{draw.number(0, 23):02}:{draw.number(0, 59):02}"


def date(draw: Draw) -> str:
    """A day as programs write it."""
    return f"20{draw.number(10, 39)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"


def identifier(draw: Draw) -> str:
    """The name of a thing that has no name: A-1234 or KX7."""
    letters = "".join(draw.several(_LETTERS, draw.number(1, 2)))
    return f"{letters}{draw.one(['', '-'])}{draw.number(1, 9999)}"


def named_thing(draw: Draw) -> str:
    """Whatever a user may call by its name."""
    return draw.one((word, place, person, identifier, place))(draw)
