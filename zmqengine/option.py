"""An option as data: it stands once, in a dataclass, with its type, default, bounds and help.

    rows_max: int = option(32, within=(1, 4096), help="Requests in the batch at once.")

The unit is in the name. `options_of` reads them back for a command line, `check` for a constructor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from zmqengine.errors import ConfigError

MIB = 1 << 20
DAY_S = 86_400.0
DAY_MS = 86_400_000

T = TypeVar("T")
Bounds = tuple["float | None", "float | None"]
Unit = Literal["bytes", "ms", "s", "tokens", ""]
_UNITS: tuple[Unit, ...] = ("bytes", "ms", "s", "tokens")
_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What neither name nor type say of an option. `within` is the lowest and the highest that a number may be.

    `flag` and `unit` are for names that do not tell them, `metavar` is what stands for the value in a help text, and
    `otherwise` what holds without the option where its default does not say it.
    """

    help: str
    within: Bounds = (None, None)
    flag: str = ""
    unit: Unit = ""
    metavar: str = ""
    otherwise: str = ""
    hidden: bool = False


def option(default: T, **about: Any) -> T:
    """A field that is an option, by the fields of `About`. A field without it is for programs only."""
    metadata = {_KEY: About(**about)}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=lambda: dict(default), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a dataclass. `kinds` are the types that a value may have, None apart; or it is one of `words`."""

    name: str
    kinds: tuple[Any, ...]
    words: tuple[str, ...]
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """What it is called on the command line. Times without a unit there are seconds."""
        return self.about.flag or "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def unit(self) -> Unit:
        """What a number of it counts, as far as that has a name."""
        parts = self.name.split("_") if {int, float} & {*self.kinds} else []
        return self.about.unit or next((unit for unit in _UNITS if unit in parts), "")

    def check(self, value: Any) -> None:
        """Raise `ConfigError` with what it may be."""
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


def check(config: object) -> None:
    """Raise `ConfigError` for the first option out of its bounds; for `__post_init__`."""
    kind: Any = type(config)
    for each in options_of(kind):
        each.check(getattr(config, each.name))


@functools.cache
def options_of(config: type) -> tuple[Option, ...]:
    """The options of a dataclass: its own first, then those of the class it builds on."""
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
    if high is None:
        return f"at least {low:.15g}"
    return f"at most {high:.15g}" if low is None else f"from {low:.15g} to {high:.15g}"
