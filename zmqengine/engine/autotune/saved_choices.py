"""Choices of kernel variants that an earlier start measured on this machine.

A new measurement would slow the start and might choose otherwise. Variants differ by rounding, so a worker that
restarts after a crash must use the same ones, or resumed streams would differ.
"""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from pathlib import Path

from zmqengine.paths import cache_directory, replace_file

log = logging.getLogger("zmqengine.engine")


class SavedChoices:
    """Choices by name, for one device and one release of MLX. A file that cannot be read or written is no error."""

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
        """Add `choices` to the file."""
        if choices.items() <= self.choices.items():
            return
        self.choices |= choices
        try:
            replace_file(self._path, json.dumps({"choices": self.choices}, indent=1, sort_keys=True).encode())
        except OSError as error:
            log.info(
                "autotune: choices cannot be saved, the next start measures again",
                extra={"reason": str(error)},
            )
