"""Every option of a worker, validated once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from zmqengine.client_rules import ClientRules
from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import DEFAULT_NAME, Endpoints, endpoints, is_loopback, resolve

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How one worker is to run. Building one raises `ConfigError` with what to change.

    `model` is `pico` (bundled), a local directory or a hub id. `engine` is `mlx`, or `fake:` and the JSON of
    a `FakeEngineConfig`. `bind` is the address of ctl; without it the worker listens at the ipc address of
    `name`. `bind_cmd` and `bind_out` replace the addresses that follow from ctl: a restarted worker gets its
    old ports so.
    """

    model: str = "pico"
    name: str = DEFAULT_NAME
    bind: str | None = None
    bind_cmd: str | None = None
    bind_out: str | None = None
    engine: str = "mlx"

    rows_max: int = 32
    """Requests in the batch at once, in prefill and decode together."""
    prefill_chunk: int = 2048
    """Prompt tokens read in one pass, at the most. `prefill_ms` makes it less on slower machines."""
    prefill_ms: float = 200.0
    """What reading prompts may add to a pass while others decode; chunks shrink to it. 0: as it comes."""
    prompt_cache_bytes: int = 512 * MIB
    """Kept for prompts that start alike; 0 turns the prompt cache off."""
    context_max: int | None = None
    """Tokens of prompt and output that one request may hold; None is what the model has."""
    growth_tokens: int = 256
    """Memory that a row is promised ahead of its output, in tokens."""
    memory_limit_bytes: int | None = None
    """What MLX may hold in all; None is what the system recommends."""
    wired_limit: str = "auto"
    """What macOS may keep from being paged out: `auto` for the memory limit, `off`, or a number of bytes."""

    queue_max: int = 1024
    ageing_s: float = 15.0
    """Work that more urgent work has kept waiting for so long gets every 20th start from then on."""
    share: tuple[str, ...] = ()
    """`PATTERN=WEIGHT`: shares of the service for front-ends by name or key; 1 for all others."""
    priority_min: tuple[str, ...] = ()
    """`PATTERN=PRIORITY`: the most urgent priority that front-ends may ask for; -100 for all others."""
    sessions_max: int = 256
    peer_share: float = 0.5
    """Of all sessions, for one key or one process; where neither is known there is no such bound."""
    requests_per_session_max: int = 1024
    frame_bytes_max: int = 16 * MIB
    token_log_bytes_max: int = 64 * MIB
    """For each session, the tokens kept until they are acknowledged."""
    session_backlog_tokens_max: int = 1_000_000
    """For each session, tokens made and not taken by its socket; past it requests end with slow_consumer."""
    lease_ms: int = 60_000
    grace_ms: int = 2_000
    """From the moment a front-end's subscription goes until its requests are aborted."""

    drain_timeout_s: float = 30.0
    pass_timeout_s: float = 60.0
    """A pass of the actor that takes longer ends the process; 0 turns the watchdog off."""
    load_timeout_s: float = 600.0
    """Loading or warm-up that gets no further for so long ends the process; 0 lets it take any time."""
    slow_pass_ms: float = 1_000.0
    """A pass that takes longer is logged with the time of each phase."""
    engine_failures_max: int = 5
    engine_failures_window_s: float = 60.0

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    supervise: bool = True
    restarts_max: int = 5
    restart_window_s: float = 60.0
    restart_wait_ms: int = 100
    """Before the first restart; it doubles for each further one in the window."""
    restart_wait_max_ms: int = 10_000
    die_with_parent: bool = False

    authorized_keys: str | None = None
    """Directory of the public keys of those who may connect; with it CURVE is on."""
    server_key: str | None = None
    """File of the worker's own secret key."""
    operator_keys: str | None = None
    """Directory of the public keys of those who may drain the worker."""

    fault_drop_frames: float = 0.0
    """For tests: the share of token frames that the publisher loses on purpose."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(
                    f"{option_name(name)} is {value}: it must be from {low:.15g} to {high:.15g}"
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{option_name(name)} is {getattr(self, name)!r}: it must be one of {', '.join(choices)}"
                )
        if "/" in self.name:
            raise ConfigError(f"the name {self.name!r} has a slash: use --bind for an address")
        if not self.model:
            raise ConfigError("--model is empty: give pico, a directory or a hub id")
        if self.engine != "mlx" and not self.engine.startswith("fake:"):
            raise ConfigError(
                f"the engine {self.engine!r} is unknown: it must be mlx, or fake: followed by JSON"
            )
        if self.wired_limit not in ("auto", "off") and not self.wired_limit.isdecimal():
            raise ConfigError(
                f"--wired-limit is {self.wired_limit!r}: it must be auto, off or a size such as 12G"
            )
        self._check_addresses()
        self._check_keys()
        _ = self.shares, self.priorities_min

    @property
    def shares(self) -> ClientRules:
        """Each front-end's weight in the order of service."""
        return ClientRules.parse(self.share, "--share", low=0.01, high=100, default=1)

    @property
    def priorities_min(self) -> ClientRules:
        """The most urgent priority that each front-end may ask for."""
        return ClientRules.parse(self.priority_min, "--priority-min", low=-100, high=100, default=-100)

    @property
    def endpoints(self) -> Endpoints:
        """The three addresses to bind. A tcp port may be 0: any free one."""
        derived = endpoints(resolve(self.bind or self.name))
        return Endpoints(derived.ctl, self.bind_cmd or derived.cmd, self.bind_out or derived.out)

    @property
    def wired_bytes(self) -> int | None:
        """`wired_limit` as a number: None is auto, 0 is off."""
        return (
            None if self.wired_limit == "auto" else 0 if self.wired_limit == "off" else int(self.wired_limit)
        )

    @property
    def uses_curve(self) -> bool:
        """Whether a front-end needs a key to connect."""
        return self.server_key is not None

    def pinned(self, real: Endpoints) -> WorkerConfig:
        """The same options bound to the addresses that an earlier life of this worker got."""
        return dataclasses.replace(self, bind=real.ctl, bind_cmd=real.cmd, bind_out=real.out)

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """The options in `text`. Raises `ConfigError` for a wrong type or an unknown key."""
        try:
            unknown = msgspec.json.decode(text, type=dict[str, object]).keys() - _NAMES
            if unknown:
                raise ConfigError(f"unknown worker options: {', '.join(sorted(unknown))}")
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"invalid worker options: {error}") from error

    def _check_addresses(self) -> None:
        addresses = self.endpoints
        if len({address.split("://")[0] for address in (addresses.ctl, addresses.cmd, addresses.out)}) > 1:
            raise ConfigError(f"{addresses.ctl}, {addresses.cmd} and {addresses.out} are of different kinds")
        for address in (addresses.ctl, addresses.cmd, addresses.out):
            if not is_loopback(address) and not self.uses_curve:
                raise ConfigError(
                    f"{address} can be reached from other machines: make keys with `zmqengine keygen` and "
                    "give --server-key and --authorized-keys, or bind 127.0.0.1"
                )

    def _check_keys(self) -> None:
        if (self.authorized_keys is None) != (self.server_key is None):
            raise ConfigError(
                "--authorized-keys and --server-key belong together: make keys with `zmqengine keygen`"
            )
        if self.operator_keys is not None and not self.uses_curve:
            raise ConfigError("--operator-keys needs --server-key and --authorized-keys too")
        if self.uses_curve and self.endpoints.is_ipc:
            raise ConfigError(
                "keys are for tcp; an ipc address is protected by its directory: "
                "leave the key options out or give --bind tcp://HOST:PORT"
            )


def option_name(field: str) -> str:
    """What the option for this field is called on the command line. Times without a unit are seconds."""
    if field == "memory_limit_bytes":
        return "--memory-limit"
    return "--" + field.removesuffix("_s").replace("_", "-")


_DAY_S = 86_400.0
_BOUNDS: dict[str, tuple[float, float]] = {
    "rows_max": (1, 4096),
    "prefill_chunk": (1, 65_536),
    "prefill_ms": (0, 1000 * _DAY_S),
    "prompt_cache_bytes": (0, 1 << 50),
    "context_max": (2, 1 << 31),
    "growth_tokens": (8, 1 << 20),
    "memory_limit_bytes": (MIB, 1 << 50),
    "queue_max": (1, 1_000_000),
    "ageing_s": (0, _DAY_S),
    "sessions_max": (1, 65_536),
    "peer_share": (0.01, 1),
    "requests_per_session_max": (1, 1_000_000),
    "frame_bytes_max": (4096, 64 * MIB),
    "token_log_bytes_max": (64 * 1024, 1 << 40),
    "session_backlog_tokens_max": (1, 1 << 40),
    "lease_ms": (100, 1000 * _DAY_S),
    "grace_ms": (0, 1000 * _DAY_S),
    "drain_timeout_s": (0, _DAY_S),
    "pass_timeout_s": (0, _DAY_S),
    "load_timeout_s": (0, _DAY_S),
    "slow_pass_ms": (0, 1000 * _DAY_S),
    "engine_failures_max": (0, 1000),
    "engine_failures_window_s": (0.001, _DAY_S),
    "restarts_max": (0, 1_000_000),
    "restart_window_s": (0.001, _DAY_S),
    "restart_wait_ms": (0, 1000 * _DAY_S),
    "restart_wait_max_ms": (0, 1000 * _DAY_S),
    "fault_drop_frames": (0, 0.99),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
_NAMES = {field.name for field in dataclasses.fields(WorkerConfig)}
