"""The names that transformers exports are kept on disk, and found anew for another release."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import two_starts
from zmqengine.engine.models.transformers_names import Structure, keep

FOUND: Structure = {
    frozenset({"torch"}): {"a.modeling_a": {"A"}},
    frozenset(): {"a.configuration_a": {"AConfig"}},
}


class Finding:
    """transformers' function, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module_path: str | Path, prefix: str | None = None) -> Structure:
        self.calls += 1
        return dict(FOUND)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "package/models").mkdir(parents=True)
    (tmp_path / "package/__init__.py").write_text("")
    return tmp_path / "package"


def test_names_are_found_once_for_each_prefix(package: Path, tmp_path: Path) -> None:
    """Later imports read what the first one found; the folders of single models are not kept."""
    for calls in (3, 1):
        find = Finding()
        kept = keep(find, package, tmp_path / "kept")
        assert kept(package / "models", prefix="models") == FOUND
        assert kept(str(package / "models/__init__.py")) == FOUND
        kept(package / "models/a/__init__.py")
        assert find.calls == calls


@pytest.mark.parametrize("spoil", ["release", "damage", "no directory"])
def test_names_are_found_anew(package: Path, tmp_path: Path, spoil: str) -> None:
    """For another release, and where the file is damaged or cannot be written."""
    directory = tmp_path / "kept"
    keep(Finding(), package, directory)(package / "models", "models")
    (file,) = directory.iterdir()
    if spoil == "release":
        (package / "__init__.py").write_text("__version__ = 2")
    elif spoil == "damage":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        directory = file
    find = Finding()
    assert keep(find, package, directory)(package / "models", "models") == FOUND
    assert find.calls == 1


def test_an_import_of_mlx_lm_reads_the_kept_names(tmp_path: Path) -> None:
    """The second one reads the folders of a few models alone, and has the names that the first one has found."""
    script = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(str(args[0])))\n"
        "from zmqengine.engine.models.transformers_import import import_transformers\n"
        "import_transformers()\n"
        "import transformers, zlib\n"
        "print(sum('/modeling_' in path for path in opened), zlib.crc32(repr(sorted(dir(transformers))).encode()))\n"
    )
    (read_first, names_first), (read_then, names_then) = two_starts(script, tmp_path)
    assert int(read_first) > 100
    assert int(read_then) < 10
    assert names_then == names_first
