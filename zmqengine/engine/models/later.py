"""Modules that are imported when one of their names is used, not when it is bound. This module must not import MLX."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class _Later:
    """A name of a module. Calling it, reading from it and `isinstance` import the module."""

    def __init__(self, module: str, name: str, before: Callable[[], None]) -> None:
        self._module = module
        self._name = name
        self._before = before

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._find()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        # `typing` asks for such names when it builds an annotation.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._find(), name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._find())

    def _find(self) -> Any:
        self._before()
        return getattr(importlib.import_module(self._module), self._name)


class _LaterModule(ModuleType):
    def __init__(self, name: str, before: Callable[[], None]) -> None:
        super().__init__(name)
        self._before = before

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name, self._before)


@contextlib.contextmanager
def imported_later(*names: str, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, `from M import N` of a module of these names imports nothing yet; `before` is called before it does.

    A module that has been imported already is taken as it is.
    """
    modules = {name: _LaterModule(name, before) for name in names if name not in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
