"""Directories with a drafter that looks inside the model it drafts for, by their config: no arrays are read here.

Such a drafter is no model: it has few layers, takes the model's hidden states or keys, and mostly its embedding too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

Reader = Literal["eagle3", "dflash", "assistant", "head", ""]

HEAD_DRAFTERS = ("qwen3_5_mtp",)
"""Types of directories with a head of such a model, which is read as if the model's own files had it."""
HEAD_BEGINNING = "mtp."
"""How the names of its tensors may begin, as in the model's own files."""
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


class Drafter(NamedTuple):
    """A drafter in a directory. `reader`: how it is read; empty where it is not, for the `problem`."""

    kind: str
    reader: Reader
    config: Mapping[str, Any]
    problem: str = ""

    @property
    def description(self) -> str:
        """One line about a directory that was given as a model."""
        told = self.problem or "give it as --draft, beside the model that it was made for"
        return f"it is {self.kind}, which drafts for a model and is none: {told}"


def read_drafter(directory: Path) -> Drafter | None:
    """The drafter in a directory; None for a model, and for what has no config."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return drafter_of(config) if isinstance(config, dict) else None


def drafter_of(config: Mapping[str, Any]) -> Drafter | None:
    """The drafter that a config describes; None for that of a model."""
    kind = str(config.get("model_type", ""))
    named = config.get("architectures")
    names = {kind.lower(), str(config.get("speculators_model_type", "")).lower()}
    names |= {str(name).lower() for name in named} if isinstance(named, list) else set()
    if any("eagle3" in name for name in names):
        return Drafter("an EAGLE-3 drafter", "eagle3", config)
    if any("eagle" in name for name in names):
        return Drafter("an EAGLE drafter", "", config, "of EAGLE, version 3 is read alone")
    if any("dspark" in name for name in names):
        return Drafter("a DSpark drafter", "", config, "such drafters are not read")
    if "dflash_config" in config or any("dflash" in name for name in names):
        return Drafter("a DFlash drafter", "dflash", config)
    if kind in _ASSISTANTS:
        return Drafter("a Gemma 4 assistant", "assistant", config)
    if kind in HEAD_DRAFTERS:
        return Drafter("a head in a directory of its own", "head", config)
    if kind.endswith("_mtp"):
        problem = f"heads of the type {kind} are not read"
        return Drafter("a head in a directory of its own", "", config, problem)
    if any("medusa" in name for name in names):
        return Drafter("a Medusa drafter", "", config, "heads that guess each token apart are not read")
    return None
