"""Directories and files of this user, for workers and clients alike."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """The directory of everything that can be made again: cached prompts, tokenizers, autotuned choices.

    `$ZMQENGINE_CACHE_DIR`; else `$XDG_CACHE_HOME/zmqengine`; else `~/Library/Caches/zmqengine` on macOS and
    `~/.cache/zmqengine` elsewhere. It need not exist yet.
    """
    if chosen := os.environ.get("ZMQENGINE_CACHE_DIR"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "zmqengine"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "zmqengine"


def state_directory() -> Path:
    """The directory of what is kept and cannot be made again: `$XDG_STATE_HOME/zmqengine`, or
    `~/.local/state/zmqengine`. It need not exist yet."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "zmqengine"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file and its directory; other processes see the old file or the whole new one. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        os.unlink(part)
        raise
