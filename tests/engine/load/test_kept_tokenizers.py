"""Exported tokenizers on disk: found by what the checkpoint says, and exported anew when that differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.models import save_model
from tests.support.processes import two_starts
from zmqengine.engine.load import kept_tokenizers
from zmqengine.engine.load.kept_tokenizers import FILES_MAX, is_kept, kept_tokenizer
from zmqengine.engine.load.loader import load
from zmqengine.engine.load.tokenizer_export import ExportedTokenizer


@pytest.fixture
def exported(model_directory: Path) -> ExportedTokenizer:
    return load(str(model_directory)).tokenizer


class Exporting:
    """An export, counted."""

    def __init__(self, exported: ExportedTokenizer) -> None:
        self._exported = exported
        self.calls = 0

    def __call__(self) -> ExportedTokenizer:
        self.calls += 1
        return self._exported


def test_a_tokenizer_is_exported_once(tmp_path: Path, exported: ExportedTokenizer) -> None:
    """For each checkpoint, wherever that lies; weights are no part of it."""
    export = Exporting(exported)
    for name in ("one", "two"):
        model = save_model(tmp_path / name)
        (model / "model.safetensors").write_bytes(name.encode())
        assert is_kept(model, tmp_path / "kept") == (name == "two")
        assert kept_tokenizer(model, export, tmp_path / "kept") == exported
    assert export.calls == 1


@pytest.mark.parametrize(
    "spoil", ["tokenizer.json", "config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
)
def test_a_checkpoint_that_differs_is_exported_anew(
    tmp_path: Path, exported: ExportedTokenizer, spoil: str
) -> None:
    """In a tokenizer, the end tokens, or a template that was not there."""
    export, model = Exporting(exported), save_model(tmp_path / "model")
    kept_tokenizer(model, export, tmp_path / "kept")
    file = model / spoil
    file.parent.mkdir(exist_ok=True)
    file.write_text((file.read_text() if file.exists() else "") + " ")
    assert not is_kept(model, tmp_path / "kept")
    kept_tokenizer(model, export, tmp_path / "kept")
    assert export.calls == 2


@pytest.mark.parametrize("spoil", ["package", "damage", "cut", "no directory"])
def test_a_file_that_does_not_count_is_no_error(
    tmp_path: Path, exported: ExportedTokenizer, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another release, a damaged one, and one that cannot be written."""
    export, model, directory = Exporting(exported), save_model(tmp_path / "model"), tmp_path / "kept"
    kept_tokenizer(model, export, directory)
    (file,) = directory.iterdir()
    whole = file.read_bytes()
    if spoil == "package":
        monkeypatch.setattr(kept_tokenizers, "_PACKAGES", ("pytest",))
    elif spoil == "damage":
        file.write_bytes(whole.replace(b"the", b"eht", 1))
        assert file.read_bytes() != whole
    elif spoil == "cut":
        file.write_bytes(whole[:-3])
    else:
        directory = file
    assert kept_tokenizer(model, export, directory) == exported
    assert export.calls == 2


def test_those_used_longest_ago_are_deleted(tmp_path: Path, exported: ExportedTokenizer) -> None:
    """A user who tries many models keeps the last, and the one that is used in between."""
    model, directory = save_model(tmp_path / "model"), tmp_path / "kept"
    note = model / "note.txt"
    for number in range(FILES_MAX + 2):
        for used in (number, 0):
            note.write_text(str(used))
            kept_tokenizer(model, Exporting(exported), directory)
        for age, file in enumerate(sorted(directory.iterdir(), key=lambda file: -file.stat().st_mtime_ns)):
            # A file system may tell apart no two times of a test.
            os.utime(file, (1000 - age, 1000 - age))
    assert len(list(directory.iterdir())) == FILES_MAX
    kept = []
    for number in range(FILES_MAX + 2):
        note.write_text(str(number))
        kept.append(is_kept(model, directory))
    assert kept == [True, False, False, *[True] * (FILES_MAX - 1)]


def test_a_second_start_needs_no_transformers(tmp_path: Path) -> None:
    """It has the tokenizer of the first, which does, and all that is said of it."""
    script = (
        "import sys\n"
        "from zmqengine.engine.load.loader import load\n"
        "from zmqengine.pico import model_path\n"
        "print(load(str(model_path('pico-tools'))).tokenizer.hash, 'transformers' in sys.modules)\n"
    )
    (first, imported), (then, imported_then) = two_starts(script, tmp_path)
    assert then == first
    assert (imported, imported_then) == ("True", "False")
