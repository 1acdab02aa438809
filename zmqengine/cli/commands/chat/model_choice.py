"""The model of a talk that names none, its worker, and whether a word is a model's name or a question."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import click

from zmqengine.checkpoint.first_models import advice
from zmqengine.cli.connection import launched_models
from zmqengine.cli.flags import WorkerTarget
from zmqengine.cli.quantities import shown
from zmqengine.cli.started_worker import started_worker
from zmqengine.errors import ConfigError, UnknownModel
from zmqengine.pico import BUNDLED
from zmqengine.protocol.addresses import base_directory, ipc_path, is_listened_to, resolve
from zmqengine.protocol.launcher import DIRECTORY, ModelEntry, launcher_address, no_such_model, stand_in


def split_question(
    target: WorkerTarget, arguments: Sequence[str], models: Sequence[ModelEntry], *, loads: bool = False
) -> tuple[WorkerTarget, list[str]]:
    """The worker or model, and the words of the question. `loads`: the talk loads its model itself.

    The first argument names the model, unless an option does or it has a space. Alone it is a question, too, where
    it is not spelt like one of `models`.
    """
    asked = list(arguments)
    if target.address is not None or target.model is not None:
        return target, asked
    if (
        asked
        and asked[0] != "-"
        and " " not in asked[0]
        and (len(asked) > 1 or _is_spelt_alike(asked[0], models))
    ):
        return dataclasses.replace(target, model=asked[0]), asked[1:]
    # Models are listed also where a worker runs by default: it is asked then.
    is_choice = loads or stand_in() is not None
    return dataclasses.replace(target, model=first_choice(models) if is_choice else None), asked


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


def runs_nothing(target: WorkerTarget) -> bool:
    """Whether a talk has to load its model: no worker is named, none runs by default, no launcher does, MLX is here."""
    if target.address or target.client_key or target.server_key or os.environ.get("ZMQENGINE_ADDRESS"):
        return False
    addresses = (resolve(None), launcher_address())
    return find_spec("mlx") is not None and not any(is_listened_to(ipc_path(each)) for each in addresses)


def models_of_launcher() -> Sequence[ModelEntry]:
    """The models of this user's launcher; none without one."""
    listed = launched_models()
    return listed.models if listed is not None else ()


@contextlib.contextmanager
def worker_for(target: WorkerTarget, models: Sequence[ModelEntry]) -> Iterator[WorkerTarget]:
    """A worker of the target's model, one of `models`, which ends with the talk."""
    entry = next((each for each in models if target.model in (each.name, *each.aliases)), None)
    if entry is None:
        raise UnknownModel(no_such_model(target.model or "", [each.name for each in models]))
    if entry.never:
        raise ConfigError(f"{entry.name} cannot be loaded here: {entry.never}")
    click.echo(
        f"no worker runs: {entry.name} is loaded for this talk; `zmqengine serve` keeps models for every program",
        err=True,
    )
    if all(each.path in BUNDLED for each in models) and (fetched := advice(_limit_bytes())):
        click.echo(f"{entry.name} is a toy: {fetched}", err=True)
    with started_worker(entry.path) as (name, _):
        yield WorkerTarget(name)


@functools.cache
def _limit_bytes() -> int:
    from zmqengine.doctor.machine import look_at_machine

    limit = look_at_machine().limit_bytes
    if not limit:
        raise ConfigError("no worker runs, and MLX does not work here: zmqengine doctor says why")
    return limit


def models_of_this_machine() -> Sequence[ModelEntry]:
    """The models that a talk could load."""
    from zmqengine.serve.entries import read_offer

    limit = _limit_bytes()

    def too_large(need_bytes: int) -> str:
        return f"it needs {shown(need_bytes)}, {shown(limit)} are there" if need_bytes > limit else ""

    return [
        ModelEntry(
            entry.name,
            "unloaded",
            "",
            aliases=list(entry.aliases),
            path=entry.config.model,
            capabilities=list(entry.capabilities),
            need_bytes=entry.need_bytes,
            never=entry.never or too_large(entry.need_bytes),
        )
        for entry in read_offer([], base_directory() / DIRECTORY, {}).entries.values()
    ]


def _is_spelt_alike(word: str, models: Sequence[ModelEntry]) -> bool:
    names = [name for model in models for name in (model.name, *model.aliases)]
    return bool(difflib.get_close_matches(word, names))
