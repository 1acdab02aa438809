"""The list of models of a launcher: from a TOML file, a directory, names, or every model of this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from zmqengine.checkpoint.adapters import adapter_file, adapters_bytes
from zmqengine.checkpoint.drafters import read_drafter
from zmqengine.checkpoint.estimate import ACTIVATION_SHARE, LEAST_TOKENS, ModelCheckpoint, open_checkpoint
from zmqengine.checkpoint.on_disk import find_model, find_models, local_directory
from zmqengine.checkpoint.other_programs import foreign_models
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.config import WorkerConfig
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.host.environment import expects_gpu
from zmqengine.errors import ConfigError, ModelLoadError, UnknownModel
from zmqengine.option import options_of, size_of
from zmqengine.pico import BUNDLED, model_path
from zmqengine.protocol.launcher import no_such_model
from zmqengine.serve.model import TTL_S, FleetFacts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_OURS = ("model", "name", "bind", "bind_cmd", "bind_out", "supervise", "die_with_parent", "draft")
"""Options of a worker that the launcher sets itself, or that have a key of their own in an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model on the list, with the configuration of its worker. `never`: the reason for which it cannot be loaded
    here."""

    name: str
    config: WorkerConfig
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl_s: float = TTL_S
    preload: bool = False
    need_bytes: int = 0
    never: str = ""
    model_type: str = ""
    quantisation: str = ""
    context_tokens: int = 0
    capabilities: tuple[str, ...] = ("completion",)
    size_bytes: int = 0

    @property
    def facts(self) -> FleetFacts:
        """Facts for the fleet's decisions."""
        config = self.config
        return FleetFacts(
            name=self.name,
            need_bytes=self.need_bytes,
            signature=signature_of(config),
            pin=self.pin,
            ttl_s=self.ttl_s,
            preload=self.preload,
            never=self.never,
            restarts_max=max(1, config.restarts_max),
            restart_window_s=config.restart_window_s,
            restart_wait_s=config.restart_wait_ms / 1000,
            restart_wait_max_s=config.restart_wait_max_ms / 1000,
        )


class ModelOffer(NamedTuple):
    """The list of models, and the memory for all of them; None for MLX's recommendation."""

    entries: Mapping[str, Entry]
    budget_bytes: int | None = None

    def find(self, name: str) -> Entry:
        """The entry of a name or alias. Raises `UnknownModel` with similar names."""
        entry = self.entries.get(name)
        if entry is None:
            entry = next((each for each in self.entries.values() if name in each.aliases), None)
        if entry is None:
            aliases = (alias for each in self.entries.values() for alias in each.aliases)
            raise UnknownModel(no_such_model(name, [*self.entries], aliases))
        return entry


def signature_of(config: WorkerConfig) -> str:
    """Signature of a configuration: differs for every set of options."""
    return hashlib.sha256(config.to_json().encode()).hexdigest()[:16]


def directory_name(name: str) -> str:
    """A unique file name for a model: letters, digits, `.`, `_`, `-`, at most 40; not `ctl`, a socket there."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    # On most Macs files whose names differ in case are one.
    if plain == name == name.lower() and len(name) <= 40 and plain[0].isalnum() and plain != "ctl":
        return plain
    return f"{plain.strip('.-_')[:31]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_offer(
    sources: Sequence[str], root: Path, common: Mapping[str, object], budget: int | None = None
) -> ModelOffer:
    """The models of `sources`: TOML files, directories, or names; without sources, every model of this machine.

    `root`: directory of their sockets; `common`: options of every worker; `budget`: memory of all of them, None for the
    value in the files. Raises `ConfigError`.
    """
    found: dict[str, Entry] = {}
    listings = {
        source: _read_file(path)
        for source in sources
        if (path := Path(source).expanduser()).suffix == ".toml"
    }
    for source, listing in listings.items():
        if budget is None and listing.memory is not None:
            budget = _size(listing.memory, f"{source}: memory")
    if budget == 0:
        raise ConfigError("memory: 0 bytes hold no model")
    common = {**common, "memory_total_bytes": budget}
    for source in sources:
        path = Path(source).expanduser()
        if source in listings:
            listing = listings[source]
            entries = list(_listed(listing, path, root, common))
        else:
            entries = list(_named(source, path, root, common))
        for entry in entries:
            if entry.name in found:
                raise ConfigError(f"{source}: there are two models of the name {entry.name!r}")
            found[entry.name] = entry
    if not sources:
        found = _all_of_this_machine(root, common)
    _check_aliases(found)
    return ModelOffer(_with_short_names(found), budget)


# --- a TOML file --------------------------------------------------------------------------------------------


class _Listed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """One `[[model]]` table of the file."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    path: str = ""
    aliases: tuple[Annotated[str, Meta(min_length=1, max_length=512)], ...] = ()
    draft: str | None = None
    pin: bool = False
    ttl: Annotated[float, Meta(ge=-1)] = TTL_S
    preload: bool = False
    options: dict[str, Any] = {}


class _Listing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The whole file."""

    model: tuple[_Listed, ...] = ()
    memory: int | str | None = None
    options: dict[str, Any] = {}


def _read_file(path: Path) -> _Listing:
    try:
        written = tomllib.loads(path.read_text("utf-8"))
        if isinstance(written.get("model"), dict):
            raise ConfigError(f"{path}: [model] is one table: write [[model]] before each model")
        return msgspec.convert(written, _Listing)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {str(error).replace('`', '')}") from None


def _listed(listing: _Listing, path: Path, root: Path, common: Mapping[str, object]) -> Iterator[Entry]:
    shared = {**common, **_options(listing.options, f"{path}: options")}
    names = set[str]()
    for listed in listing.model:
        where = f"{path}: model {listed.name!r}"
        if listed.name in names:
            raise ConfigError(f"{where}: there are two of this name")
        names.add(listed.name)
        if not all(name.isprintable() for name in (listed.name, *listed.aliases)):
            raise ConfigError(f"{where}: a name has characters that cannot be shown")
        options = {**shared, **_options(listed.options, where)}
        if listed.draft is not None:
            options["draft"] = listed.draft
        try:
            entry = _entry(listed.name, listed.path or listed.name, root, options)
        except (ConfigError, ModelLoadError) as error:
            raise ConfigError(f"{where}: {error}") from None
        yield dataclasses.replace(
            entry,
            aliases=listed.aliases,
            pin=listed.pin,
            ttl_s=float("inf") if listed.ttl < 0 else listed.ttl,
            preload=listed.preload,
        )


def _options(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of `zmqengine worker` by the names of their flags without the leading dashes; sizes may be text."""
    known = {option.flag.removeprefix("--"): option for option in options_of(WorkerConfig)}
    options: dict[str, Any] = {}
    for key, value in given.items():
        option = known.get(key.replace("_", "-"))
        if option is None or option.name in _OURS:
            raise ConfigError(f"{where}: {key!r} is not an option of a model here")
        is_size = option.unit == "bytes" and isinstance(value, str) and value not in option.words
        options[option.name] = _size(value, f"{where}: {key}") if is_size else value
    return options


def _size(value: str | int, where: str) -> int:
    try:
        return size_of(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


# --- directories, names, and all models of this machine ------------------------------------------------------------


def _named(source: str, path: Path, root: Path, common: Mapping[str, object]) -> Iterator[Entry]:
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*/config.json"))
        if not files:
            raise ConfigError(f"{path} has no models: no directory in it has a config.json")
        for file in files:
            yield _entry(file.parent.name, str(file.parent), root, common)
        return
    try:
        yield _entry(path.resolve().name if path.is_dir() else source, source, root, common)
    except ModelLoadError as error:
        raise ConfigError(f"{error}; nor is it a file of models (.toml)") from None


def _all_of_this_machine(root: Path, common: Mapping[str, object]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    paths = [(name, name) for name in BUNDLED]
    paths += [(model.name, str(model.directory)) for model in find_models()]
    paths += [(model.name, str(model.directory)) for model in foreign_models() if not model.problem]
    for name, path in paths:
        if name not in entries:
            entries[name] = _entry(name, path, root, common)
    return entries


def _entry(name: str, path: str, root: Path, options: Mapping[str, object]) -> Entry:
    """The entry of one model. Raises `ConfigError`, or `ModelLoadError` for a path that is not a model."""
    bind = f"ipc://{root}/{directory_name(name)}/ctl"
    fields = {**options, "model": path, "name": name.replace("/", "--"), "model_name": name, "bind": bind}
    if fields.get("memory_limit_bytes"):
        # Its share is its limit, whatever all have: it is not replaced when that changes.
        fields["memory_total_bytes"] = None
    config = WorkerConfig.from_json(msgspec.json.encode(fields).decode())
    if config.engine.startswith("fake:"):
        return _fake_entry(name, config)
    try:
        checkpoint = _checkpoint(path)
        need = need_bytes(checkpoint, config.context_max)
        if config.draft is not None:
            need += int(_draft_bytes(config.draft) / (1 - ACTIVATION_SHARE))
        adapters = adapters_bytes(config.adapters, checkpoint.weights.float_bytes)
        need += int(adapters / (1 - ACTIVATION_SHARE))
        # A worker with a memory limit of its own claims that limit, which may have no room for an image.
        limit_bytes = config.memory_limit_bytes
        seen = tuple(
            each
            for each in checkpoint.capabilities
            if each != "vision" or limit_bytes is None or limit_bytes >= need
        )
        need = limit_bytes or need
    except CheckpointError as error:
        return Entry(name=name, config=config, never=str(error))
    return Entry(
        name=name,
        config=config,
        need_bytes=need,
        model_type=checkpoint.model_type,
        quantisation=checkpoint.quantisation,
        context_tokens=min(checkpoint.shape.context_tokens, config.context_max or sys.maxsize),
        capabilities=seen,
        size_bytes=checkpoint.weights.total_bytes,
    )


def need_bytes(checkpoint: ModelCheckpoint, context_max: int | None = None) -> int:
    """Bytes that a worker of a model needs at least on this machine."""
    return checkpoint.need_bytes(context_max, on_gpu=expects_gpu())


def _checkpoint(path: str) -> ModelCheckpoint:
    if path in BUNDLED:
        return open_checkpoint(model_path(path))
    local_directory(path)
    directory = find_model(path)
    if directory is None:
        raise CheckpointError(
            f"it is not on this machine: zmqengine pull {path}, then zmqengine serve --reload"
        )
    return open_checkpoint(directory)


def _draft_bytes(path: str) -> int:
    """Bytes of the weights of a draft model, or of a drafter in a directory of its own. Raises `CheckpointError`."""
    directory = None if path in BUNDLED else find_model(path)
    drafter = None if directory is None else read_drafter(directory)
    if directory is None or drafter is None:
        return _checkpoint(path).weights.total_bytes
    if drafter.problem:
        raise CheckpointError(f"{path}: {drafter.description}")
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _fake_entry(name: str, config: WorkerConfig) -> Entry:
    try:
        fake = FakeEngineConfig.from_json(config.engine.removeprefix("fake:") or "{}")
    except msgspec.DecodeError as error:
        raise ConfigError(f"the fake engine's configuration is wrong: {error}") from None
    try:
        adapters = sum(adapter_file(path).stat().st_size for path in config.adapters.values())
    except OSError as error:
        return Entry(name=name, config=config, never=str(error))
    tokens = min(LEAST_TOKENS, fake.context_tokens)
    return Entry(
        name=name,
        config=config,
        need_bytes=fake.parameter_bytes + adapters + tokens * fake.kv_bytes_token,
        model_type="fake",
        context_tokens=min(fake.context_tokens, config.context_max or sys.maxsize),
        size_bytes=fake.parameter_bytes,
    )


def _check_aliases(entries: Mapping[str, Entry]) -> None:
    owners = {name: name for name in entries}
    for entry in entries.values():
        for alias in entry.aliases:
            if alias in owners:
                raise ConfigError(
                    f"the alias {alias!r} of {entry.name!r} is also a name of {owners[alias]!r}"
                )
            owners[alias] = entry.name


def _with_short_names(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Add NAME as an alias of OWNER/NAME, unless another model has it."""
    taken = {*entries, *(alias for entry in entries.values() for alias in entry.aliases)}
    short = [name.rsplit("/", 1)[1] for name in entries if "/" in name]
    return {
        name: dataclasses.replace(entry, aliases=(*entry.aliases, last))
        if "/" in name and (last := name.rsplit("/", 1)[1]) not in taken and short.count(last) == 1
        else entry
        for name, entry in entries.items()
    }
