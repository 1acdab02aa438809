"""Choices that an earlier start measured on this machine.

To measure again would make a start slower, and might come out otherwise. Ways differ by rounding, so a worker that
starts again after a crash must take those it took before.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from hashlib import sha256
from pathlib import Path

from zmqengine.paths import cache_directory

log = logging.getLogger("zmqengine.engine")


class Remembered:
    """Choices by their names, for one device and one release of MLX. What cannot be read or written is forgotten."""

    def __init__(self, device: str, mlx_version: str, directory: Path | None = None) -> None:
        name = sha256(f"{device} {mlx_version}".encode()).hexdigest()[:16]
        self._path = (directory or cache_directory() / "choices") / f"{name}.json"
        self.choices: dict[str, str] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.choices = {str(what): str(choice) for what, choice in found["choices"].items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return

    def keep(self, choices: dict[str, str]) -> None:
        """Remember these too."""
        if choices.items() <= self.choices.items():
            return
        self.choices |= choices
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".json")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"choices": self.choices}, file, indent=1, sort_keys=True)
            os.replace(name, self._path)
        except OSError as error:
            log.info("what was measured is not kept", extra={"reason": str(error)})
