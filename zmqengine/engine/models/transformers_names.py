"""The names that transformers exports, kept on disk.

transformers reads the source of all its models to find them, twice and at every import: half of the time that an import
of mlx-lm takes. This module must not import MLX.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import msgspec

from zmqengine.paths import cache_directory, replace_file, signature_of

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""The exported names by what they need, and by module."""


class _KeptNames(msgspec.Struct):
    of: str
    names: list[tuple[frozenset[str], dict[str, set[str]]]]


@contextlib.contextmanager
def kept_names() -> Iterator[None]:
    """Inside, an import of transformers takes its names from disk, and leaves them there if it finds none of its own.

    A release that has no such function is imported as it is.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_keep(module: ModuleType) -> None:
            execute(module)
            if (find := getattr(module, _FUNCTION, None)) is not None:
                setattr(module, _FUNCTION, keep(find, Path(str(module.__file__)).parents[1]))

        spec.loader.exec_module = execute_and_keep  # type: ignore[method-assign]
        return spec


def keep(
    find: Callable[[str | Path, str | None], Structure], package: Path, directory: Path | None = None
) -> Callable[..., Structure]:
    """`find` of the transformers in `package`, with what it finds for all models kept in `directory`.

    It is found anew for another release, or for one that was installed again. A file that cannot be read or written is
    no error.
    """
    kept_in = directory or cache_directory() / "imports"
    models = package / "models"

    def find_or_read(module_path: str | Path, prefix: str | None = None) -> Structure:
        if Path(module_path) not in (models, models / "__init__.py"):
            return find(module_path, prefix)
        of = signature_of(package / "__init__.py")
        path = kept_in / f"transformers-{prefix or 'models-alone'}.msgpack"
        try:
            kept = msgspec.msgpack.decode(path.read_bytes(), type=_KeptNames)
        except (OSError, msgspec.DecodeError):
            kept = None
        if kept is not None and kept.of == of:
            return dict(kept.names)
        found = find(module_path, prefix)
        with contextlib.suppress(OSError, TypeError):
            replace_file(path, msgspec.msgpack.encode(_KeptNames(of, list(found.items()))))
        return found

    return find_or_read
