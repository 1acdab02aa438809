"""The tree of errors is as it is drawn."""

from __future__ import annotations

import re

import pytest

from zmqengine import errors
from zmqengine.errors import ZmqEngineError


def drawn() -> dict[str, tuple[str, str]]:
    """Class name -> (name of its parent, text beside it), as the module's docstring draws them."""
    found: dict[str, tuple[str, str]] = {}
    branch = ZmqEngineError.__name__
    assert errors.__doc__
    for line in errors.__doc__.splitlines():
        match = re.match(r" {0,4}(│   )?[├└]── (\w+) +(.*)", line)
        if match:
            indented, name, text = match.groups()
            found[name] = (branch if indented else ZmqEngineError.__name__, text)
            branch = branch if indented else name
    return found


def classes() -> list[type[ZmqEngineError]]:
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ZmqEngineError)]


def test_the_drawing_shows_every_class_under_its_parent() -> None:
    """Neither a class that is not drawn nor one drawn elsewhere."""
    assert {name: parent for name, (parent, _) in drawn().items()} == {
        cls.__name__: cls.__base__.__name__ for cls in classes() if cls is not ZmqEngineError and cls.__base__
    }


def test_the_drawing_gives_each_leaf_its_code() -> None:
    """The word beside a class is its wire code; a class with others below it has a sentence instead."""
    for cls in classes():
        if not cls.__subclasses__():
            assert drawn()[cls.__name__][1].split()[0] == cls.code


@pytest.mark.parametrize("cls", [cls for cls in classes() if not cls.__subclasses__()])
def test_a_code_leads_back_to_its_class(cls: type[ZmqEngineError]) -> None:
    """What a worker sends as a word, a client catches as a class."""
    error = errors.from_code(cls.code, "why", retry_after_ms=7)
    assert type(error) is cls
    assert (str(error), error.message, error.retry_after_ms) == ("why", "why", 7)


def test_every_class_says_what_happened_in_one_sentence() -> None:
    """A docstring of one line, ended with a full stop."""
    for cls in classes():
        assert cls.__doc__
        assert re.fullmatch(r"[^\n]+\.", cls.__doc__), cls


def test_a_code_of_a_newer_worker_is_kept() -> None:
    """It can still be caught, printed and compared, and other errors keep their own code."""
    error = errors.from_code("too_hot", "wait")
    assert type(error) is ZmqEngineError
    assert error.code == "too_hot"
    assert ZmqEngineError("x").code == "error"
