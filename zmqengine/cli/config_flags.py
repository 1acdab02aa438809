"""Flags of a dataclass of options: names, types, help and displayed defaults all come from `option`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_origin

import click

from zmqengine.cli.quantities import byte_size, shown
from zmqengine.option import Option, options_of

_METAVARS = {"bytes": "SIZE", "s": "SECONDS", "ms": "MILLISECONDS", "tokens": "TOKENS"}


def flags_of(config: type) -> Callable[[click.Command], click.Command]:
    """Add a flag for every option of `config` to a command. Flags that are not given arrive as None or empty."""

    def with_flags(command: click.Command) -> click.Command:
        command.params[:0] = [_flag(option) for option in options_of(config)]
        return command

    return with_flags


def _flag(option: Option) -> click.Option:
    about = option.about
    default = about.otherwise or _shown(option)
    settings: dict[str, Any] = {
        "default": None,
        "help": f"{about.help}  [default: {default}]" if default else about.help,
        "hidden": about.hidden,
        "metavar": about.metavar or _METAVARS.get(option.unit),
    }
    if bool in option.kinds:
        switch = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        return click.Option([switch, option.name], is_flag=True, **(settings | {"metavar": None}))
    if any(get_origin(kind) in (tuple, dict) for kind in option.kinds):
        return click.Option(
            [*filter(None, [about.short]), option.flag, option.name], multiple=True, **settings
        )
    return click.Option([option.flag, option.name], type=_type(option), **settings)


def _type(option: Option) -> Any:
    if option.unit == "bytes":
        return byte_size if not option.words else _size_or_word
    if option.words:
        return click.Choice(option.words)
    return next(kind for kind in (int, float, str) if kind in option.kinds)


def _size_or_word(value: str) -> int | str:
    # The configuration checks the word.
    return value if value.isalpha() else byte_size(value)


def _shown(option: Option) -> str:
    default = option.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ((), {}, ""):
        return ""
    if option.unit == "bytes" and isinstance(default, int):
        return shown(default)
    return f"{default:.15g}" if isinstance(default, float) else str(default)
