"""A directory that only this user can look into."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zmqengine.errors import ConfigError

SUBDIRECTORY = "prompts"


def own_directory(path: Path) -> Path:
    """The one for prompts in `path`, made if it is missing. Raises `ConfigError` when it cannot be used."""
    own = path.expanduser() / SUBDIRECTORY
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"--cache-dir: {own} is not a directory of your own: give another one")
        own.chmod(0o700)
        if not os.access(own, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"--cache-dir: {own} cannot be written to: give another one")
    except OSError as error:
        raise ConfigError(f"--cache-dir: {own} cannot be used: {error}; give another one") from None
    return own
