"""Rules that assign numbers to front-ends by name or key: shares of the service, priorities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from zmqengine.errors import ConfigError

KEY = "key:"
KEY_CHARACTERS_MIN = 8


class ClientRule(NamedTuple):
    """A pattern of front-ends, and their number."""

    pattern: str
    value: float

    def names(self, client: str, user: str) -> bool:
        """Whether the pattern matches this front-end; `user` is its public key, or empty."""
        if self.pattern.startswith(KEY):
            return user.startswith(self.pattern.removeprefix(KEY))
        return fnmatchcase(client, self.pattern)


class ClientRules:
    """`PATTERN=NUMBER` rules in order. The first match counts; `default` without one.

    A pattern matches the name in a front-end's hello, with `*`, `?` and `[a-z]` as in a shell. A front-end chooses that
    name itself; `key:` and the first 8 or more characters of its public key match its key instead.
    """

    def __init__(self, rules: Sequence[ClientRule], default: float) -> None:
        self._rules = tuple(rules)
        self._default = default

    @classmethod
    def parse(
        cls, texts: Sequence[str], option: str, *, low: float, high: float, default: float
    ) -> ClientRules:
        """The rules in the values of `option`. Raises `ConfigError` with the correct form."""
        return cls([_rule(text, option, low, high) for text in texts], default)

    def of(self, client: str, user: str = "") -> float:
        """The number of this front-end."""
        return next((rule.value for rule in self._rules if rule.names(client, user)), self._default)


def _rule(text: str, option: str, low: float, high: float) -> ClientRule:
    # From the right: a key may have an equals sign.
    pattern, separator, number = text.rpartition("=")
    if not separator or not pattern:
        raise ConfigError(f"{option} {text!r}: write NAME=NUMBER, as in {option} 'chat*={high:g}'")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{option} {text!r}: after the equals sign goes a number from {low:g} to {high:g}")
    if pattern.startswith(KEY) and len(pattern) < len(KEY) + KEY_CHARACTERS_MIN:
        raise ConfigError(
            f"{option} {text!r}: give {KEY_CHARACTERS_MIN} or more characters of the public key, from its .key file"
        )
    return ClientRule(pattern, value)
