"""Options as data: each is declared once, in a dataclass, with its type, default, bounds and help.

    rows_max: int = option(32, within=(1, 4096), help="Requests in the batch at once.")

The unit is in the name. `options_of` reads them back for a command line, `check` for a constructor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from zmqengine.errors import ConfigError

MIB = 1 << 20
DAY_S = 86_400.0
DAY_MS = 86_400_000

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(i?b)?\Z", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

T = TypeVar("T")
Bounds = tuple["float | None", "float | None"]
Unit = Literal["bytes", "ms", "s", "tokens", ""]
_UNITS: tuple[Unit, ...] = ("bytes", "ms", "s", "tokens")
_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Metadata of an option beyond its name and type. `within` is the range of a number.

    `flag` and `unit` override what follows from the name, `short` is another flag; `metavar` is the placeholder in help
    texts; `otherwise` describes the behaviour without the option where the default value does not.
    """

    help: str
    within: Bounds = (None, None)
    flag: str = ""
    short: str = ""
    unit: Unit = ""
    metavar: str = ""
    otherwise: str = ""
    hidden: bool = False


def option(default: T, **about: Any) -> T:
    """A dataclass field that is an option; `about` are fields of `About`. Other fields are for programs only."""
    metadata = {_KEY: About(**about)}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=lambda: dict(default), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a dataclass. Its value is of one of the types `kinds`, one of `words`, or None."""

    name: str
    kinds: tuple[Any, ...]
    words: tuple[str, ...]
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """The flag on the command line. The suffix `_s` of seconds is left out."""
        return self.about.flag or "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def unit(self) -> Unit:
        """The unit of a number, if it has one."""
        parts = self.name.split("_") if {int, float} & {*self.kinds} else []
        return self.about.unit or next((unit for unit in _UNITS if unit in parts), "")

    def check(self, value: Any) -> None:
        """Raise `ConfigError` with the allowed values."""
        if value is None or (isinstance(value, str) and value in self.words):
            return
        if self.words and not (self.kinds and isinstance(value, self.kinds)):
            raise ConfigError(f"{self.flag} is {value!r}: it must be {self._alternatives()}")
        low, high = self.about.within
        if low is None and high is None:
            return
        inside = (low is None or low <= value) and (high is None or value <= high)
        if not inside or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{self.flag} is {value}: it must be {_range(low, high)}")

    def _alternatives(self) -> str:
        if not self.kinds:
            return f"one of {', '.join(self.words)}"
        return f"{', '.join(self.words)} or a {'size such as 12G' if self.unit == 'bytes' else 'number'}"


_BOUND = re.compile(
    r"Expected `?\w+`? (?P<length>of length )?(?P<sign>[<>]=?) (?P<bound>[-+.\w]+) - at `?\$\.(?P<path>[\w.]+)"
)
_SIGNS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def bound_in_words(message: str) -> tuple[str, str] | None:
    """The field at fault and its bound in words, of msgspec's message on a value out of bounds; None for any other."""
    match = _BOUND.search(message)
    if match is None:
        return None
    bound = f"{_SIGNS[match['sign']]} {match['bound']}"
    name = match["path"].rpartition(".")[2]
    if not match["length"]:
        return name, f"must be {bound}"
    return name, f"must have {bound} {'character' if match['bound'] == '1' else 'characters'}"


def size_of(value: str | int) -> int:
    """Bytes of `1048576`, `512M`, `2G` or `1.5GiB`, in units of 1024. Raises `ConfigError`."""
    match = _SIZE.match(str(value).strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a size: write it like 512M or 2G")
    size = float(match["number"]) * _FACTORS[match["unit"].lower()]
    if size >= 1 << 63:
        raise ConfigError(f"{value!r} is more memory than any machine has")
    return int(size)


def check(config: object) -> None:
    """Raise `ConfigError` for the first option out of bounds. For `__post_init__`."""
    kind: Any = type(config)
    for each in options_of(kind):
        each.check(getattr(config, each.name))


@functools.cache
def options_of(config: type) -> tuple[Option, ...]:
    """The options of a dataclass: its own first, then those of its base class."""
    kinds = typing.get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    return tuple(
        _option(fields[name], kinds[name]) for name in _own_first(config) if _KEY in fields[name].metadata
    )


def _own_first(config: type) -> list[str]:
    above = [name for base in config.__bases__ if dataclasses.is_dataclass(base) for name in _own_first(base)]
    return [*(field.name for field in dataclasses.fields(config) if field.name not in above), *above]


def _option(field: dataclasses.Field[Any], kind: Any) -> Option:
    members = get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    words = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
    kinds = tuple(
        member for member in members if get_origin(member) is not Literal and member is not type(None)
    )
    default = (
        field.default if field.default is not dataclasses.MISSING else cast(Any, field.default_factory)()
    )
    return Option(field.name, kinds, words, default, field.metadata[_KEY])


def _range(low: float | None, high: float | None) -> str:
    if low == high:
        return f"{low:.15g}"
    if high is None:
        return f"at least {low:.15g}"
    return f"at most {high:.15g}" if low is None else f"from {low:.15g} to {high:.15g}"
