"""Exported tokenizers on disk: to load one takes transformers, whose import is half of the start of a worker.

This module must not import MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from zmqengine.engine.load import tokenizer_export
from zmqengine.engine.load.tokenizer_export import ExportedTokenizer, is_whole
from zmqengine.paths import cache_directory, replace_file, signature_of

FILES_MAX = 8
"""Maximum tokenizers on disk, as of front-ends (zmqengine_client/text/tokenizer_cache.py)."""
# As mlx-lm downloads them for a tokenizer (mlx_lm/utils.py), with the configuration that names end tokens.
_SUFFIXES = (".json", ".jsonl", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_PACKAGES = ("mlx_lm", "tokenizers", "transformers")


def kept_tokenizer(
    model: Path, export: Callable[[], ExportedTokenizer], directory: Path | None = None
) -> ExportedTokenizer:
    """The tokenizer of the checkpoint in `model`, from disk or else by `export`, and then kept in `directory`.

    It is exported anew where a file of the checkpoint or a release of a package differs. A file that cannot be read or
    written is no error.
    """
    path = _path(model, directory)
    with contextlib.suppress(OSError, msgspec.DecodeError):
        kept = msgspec.msgpack.decode(path.read_bytes(), type=ExportedTokenizer)
        if is_whole(kept):
            # The least recently used files are deleted first.
            path.touch()
            return kept
    exported = export()
    with contextlib.suppress(OSError):
        replace_file(path, msgspec.msgpack.encode(exported))
        for old in sorted(path.parent.iterdir(), key=lambda file: -file.stat().st_mtime)[FILES_MAX:]:
            old.unlink()
    return exported


def is_kept(model: Path, directory: Path | None = None) -> bool:
    """Whether the tokenizer of this checkpoint is on disk."""
    return _path(model, directory).is_file()


def _path(model: Path, directory: Path | None) -> Path:
    whole = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        spec = find_spec(package)
        signature = signature_of(Path(spec.origin)) if spec is not None and spec.origin else "-"
        whole.update(signature.encode())
    whole.update(signature_of(Path(tokenizer_export.__file__)).encode())
    for file in sorted(file for file in model.rglob("*") if file.suffix in _SUFFIXES and file.is_file()):
        content = file.read_bytes()
        whole.update(f"{file.relative_to(model)} {len(content)} ".encode() + content)
    return (directory or cache_directory() / "exports") / f"{whole.hexdigest()}.msgpack"
