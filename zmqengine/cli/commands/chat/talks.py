"""Talks as files: each is kept as it grows, can be found by its words, and loaded again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zmqengine.errors import ConfigError
from zmqengine.paths import replace_file, state_directory

LAST = "last"
_SHOWN_CHARS = 70


class Talk(msgspec.Struct, frozen=True):
    """A conversation as it is kept."""

    model: str
    messages: list[dict[str, Any]]

    def texts(self) -> Iterator[str]:
        """The texts of its messages; of an image nothing."""
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                yield from (str(part["text"]) for part in content if part.get("type") == "text")


def new_name() -> str:
    """The name of a talk that begins now."""
    return time.strftime("%Y-%m-%d-%H%M%S") + f"-{os.getpid()}"


def path_of(name: str) -> Path:
    """The file of a talk: a name among those kept, or a path if it has a `/` or ends in `.json`."""
    if "/" in name or name.endswith(".json"):
        return Path(name).expanduser()
    return state_directory() / "talks" / f"{name}.json"


def keep_talk(name: str, talk: Talk) -> Path:
    """Write a talk, readable for its user alone. Raises `OSError`."""
    path = path_of(name)
    replace_file(path, msgspec.json.format(msgspec.json.encode(talk)))
    return path


def load_talk(name: str) -> Talk:
    """A talk that was kept; `last` is the newest. Raises `ConfigError` where there is none of this name."""
    kept = _files()
    if name == LAST and kept:
        name = kept[0].stem
    try:
        return msgspec.json.decode(path_of(name).read_bytes(), type=Talk)
    except OSError:
        raise ConfigError(
            f"there is no talk {name!r}: `zmqengine chat --find WORD` lists those there are"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path_of(name)} is no talk: {error}") from None


def find_talks(words: Sequence[str]) -> Iterator[str]:
    """A line for each talk that has all the words, the newest first: its name, its model and its first question."""
    for path in _files():
        try:
            talk = msgspec.json.decode(path.read_bytes(), type=Talk)
        except (OSError, msgspec.MsgspecError):
            continue
        said = "\n".join(talk.texts()).casefold()
        if all(word.casefold() in said for word in words):
            asked = next((talk_text for talk_text in _questions(talk)), "")
            yield f"{path.stem}  {talk.model}  {' '.join(asked.split())[:_SHOWN_CHARS]}"


def _questions(talk: Talk) -> Iterator[str]:
    asked = [message for message in talk.messages if message.get("role") == "user"]
    return Talk(talk.model, asked).texts()


def _files() -> list[Path]:
    """The files of talks, the newest first."""
    kept = (state_directory() / "talks").glob("*.json")
    return sorted(kept, key=lambda path: path.stat().st_mtime_ns, reverse=True)
