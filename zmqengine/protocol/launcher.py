"""Messages of a launcher's socket, field by field as in SPEC.md: which models there are, and where a model is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import base_directory, ipc_path, is_listened_to, resolve
from zmqengine.protocol.codec import Decoder
from zmqengine.protocol.messages import CallId, Done, Epoch, Message, Ping, Rejected

NAME_CHARS_MAX = 512
NAMES_ALIKE_MAX = 3
NAMES_LISTED_MAX = 8
ModelName = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
KeepAlive = Annotated[float, Meta(ge=-1, le=1e9)]
"""Seconds without a request until a model is unloaded; -1 for never."""
ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]

DIRECTORY = ".serve"
"""Beside the directories of named workers; no worker can have this name."""


def launcher_address() -> str:
    """The address of this user's launcher."""
    return f"ipc://{base_directory()}/{DIRECTORY}/ctl"


def launcher_at(address: str | None) -> str:
    """The full address for what a user typed: an address, or nothing for this user's launcher. Raises `ConfigError`."""
    return launcher_address() if address is None else resolve(address)


def stand_in() -> str | None:
    """The address of this user's launcher, if it runs and no worker is there by default or `$ZMQENGINE_ADDRESS`."""
    if os.environ.get("ZMQENGINE_ADDRESS") or is_listened_to(ipc_path(resolve(None))):
        return None
    address = launcher_address()
    return address if is_listened_to(ipc_path(address)) else None


def no_such_model(name: str, names: Sequence[str], aliases: Iterable[str] = ()) -> str:
    """The sentence about a name that is not on the list, with those spelt alike, or the first ones there are."""
    alike = difflib.get_close_matches(name[:NAME_CHARS_MAX], [*names, *aliases], NAMES_ALIKE_MAX)
    there, more = names[:NAMES_LISTED_MAX], ", ..." if len(names) > NAMES_LISTED_MAX else ""
    hint = f"; did you mean {' or '.join(alike)}?" if alike else f"; there are {', '.join(there)}{more}"
    return f"The model {name[:200]!r} does not exist{hint}"


class ModelEntry(Struct, frozen=True, omit_defaults=True):
    """One model on the launcher's list. Sizes are bytes."""

    name: str
    state: ModelState
    address: str
    aliases: list[str] = []
    path: str = ""
    model_type: str = ""
    quantisation: str = ""
    context_tokens: int = 0
    capabilities: list[str] = []
    adapters: list[str] = []
    size_bytes: int = 0
    need_bytes: int = 0
    stage: str = ""
    fraction: float | None = None
    exit_code: int | None = None
    message: str = ""
    never: str = ""
    pin: bool = False
    ttl_s: float = -1.0
    expires_s: float | None = None
    waiting: int = 0
    requests: int = 0
    loads: int = 0
    load_s: float = 0.0
    pid: int | None = None


def only_model(entries: Sequence[ModelEntry]) -> str:
    """The name of the only loaded model, or of the only one there is. Raises `ConfigError` that lists the choice."""
    loadable = [entry for entry in entries if not entry.never]
    loaded = [entry for entry in loadable if entry.state == "ready"]
    for candidates in (loaded, loadable):
        if len(candidates) == 1:
            return candidates[0].name
    names = ", ".join(entry.name for entry in loaded or loadable) or "none: it can load no model"
    raise ConfigError(f"`zmqengine serve` has several models: choose with model= or --model from {names}")


# --- requests -----------------------------------------------------------------------------------------------


class ListModels(Message, frozen=True):
    """The list of models and the memory."""

    KIND = b"L"
    call: CallId


class WantModel(Message, frozen=True):
    """A request needs this model: load it if need be. It stays until `FreeModel` names this call."""

    KIND = b"W"
    call: CallId
    model: ModelName
    keep_alive_s: KeepAlive | None = None


class FreeModel(Message, frozen=True):
    """The request of the call `wanted` has ended or waits no more. For a `WatchModels`: no further events."""

    KIND = b"F"
    call: CallId
    wanted: CallId


class LoadModel(Message, frozen=True):
    """Load a model that no request needs yet, also one that has failed."""

    KIND = b"O"
    call: CallId
    model: ModelName
    keep_alive_s: KeepAlive | None = None


class UnloadModel(Message, frozen=True):
    """Unload a model once its running requests have ended."""

    KIND = b"N"
    call: CallId
    model: ModelName


class WatchModels(Message, frozen=True):
    """Send every change of a model from now on."""

    KIND = b"V"
    call: CallId


class ReloadList(Message, frozen=True):
    """Read the list of models again."""

    KIND = b"R"
    call: CallId


# --- replies ------------------------------------------------------------------------------------------------


class ModelList(Message, frozen=True):
    """All models. `reserved_bytes`: memory of loaded ones; `foreign_bytes`: memory of others' workers."""

    KIND = b"l"
    call: CallId
    epoch: Epoch
    models: list[ModelEntry]
    budget_bytes: int = 0
    reserved_bytes: int = 0
    foreign_bytes: int = 0
    http: str = ""


class ModelAddress(Message, frozen=True):
    """The model is ready at this address, and stays until it is freed."""

    KIND = b"a"
    call: CallId
    epoch: Epoch
    model: str
    address: str


class ModelProgress(Message, frozen=True):
    """Progress of a requested model that is not ready yet; about once a second. `waits_for` names the models with an
    earlier turn."""

    KIND = b"p"
    call: CallId
    epoch: Epoch
    model: str
    state: ModelState
    stage: str = ""
    fraction: float | None = None
    waits_for: list[str] = field(default_factory=list)


class ModelChanges(Message, frozen=True):
    """The entries that have changed; the first time all of them. `gone` are names that are off the list."""

    KIND = b"v"
    call: CallId
    epoch: Epoch
    models: list[ModelEntry]
    gone: list[str] = field(default_factory=list)


class LauncherBeat(Message, frozen=True):
    """Sent once a second to every peer that holds a model or waits for one. Another epoch: a new launcher, which knows
    neither."""

    KIND = b"b"
    epoch: Epoch


LauncherRequest = (
    ListModels | WantModel | FreeModel | LoadModel | UnloadModel | WatchModels | ReloadList | Ping
)
LauncherReply = ModelList | ModelAddress | ModelProgress | ModelChanges | LauncherBeat | Done | Rejected


def launcher_decoder() -> Decoder[LauncherRequest]:
    return Decoder(LauncherRequest, frame_bytes_max=65_536)


def launcher_reply_decoder() -> Decoder[LauncherReply]:
    return Decoder(LauncherReply)
