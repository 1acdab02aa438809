"""The model of a talk that names none, and whether a word is a model's name or a question."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from zmqengine.cli.connection import launched_models
from zmqengine.cli.flags import WorkerTarget
from zmqengine.pico import BUNDLED
from zmqengine.protocol.launcher import ModelEntry, stand_in


def split_question(target: WorkerTarget, arguments: Sequence[str]) -> tuple[WorkerTarget, list[str]]:
    """The worker or model, and the words of the question.

    The first argument names the model, unless an option does or it has a space. Alone it is a question, too, where
    it is not spelt like a model of the launcher.
    """
    asked = list(arguments)
    if target.address is not None or target.model is not None:
        return target, asked
    models = _models()
    if (
        asked
        and asked[0] != "-"
        and " " not in asked[0]
        and (len(asked) > 1 or _is_spelt_alike(asked[0], models))
    ):
        return dataclasses.replace(target, model=asked[0]), asked[1:]
    return dataclasses.replace(target, model=first_choice(models) if stand_in() else None), asked


def first_choice(models: Sequence[ModelEntry]) -> str | None:
    """The model to talk with where none is named, or None.

    It is a loaded one, the one that was loaded most often, or the largest that this machine can load; bundled ones,
    which are toys, only where there is no other.
    """
    usable = [model for model in models if "completion" in model.capabilities and not model.never]

    def rank(model: ModelEntry) -> tuple[bool, int, bool, int]:
        is_bundled = model.path in BUNDLED
        size = -BUNDLED.index(model.path) if is_bundled else model.need_bytes
        return (model.state == "ready", model.loads, not is_bundled, size)

    return max(usable, key=rank).name if usable else None


def _models() -> Sequence[ModelEntry]:
    listed = launched_models()
    return listed.models if listed is not None else ()


def _is_spelt_alike(word: str, models: Sequence[ModelEntry]) -> bool:
    names = [name for model in models for name in (model.name, *model.aliases)]
    return bool(difflib.get_close_matches(word, names))
