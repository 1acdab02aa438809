"""The options of a worker, validated once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import msgspec

from zmqengine.client_rules import ClientRules
from zmqengine.engine.options import EngineOptions
from zmqengine.errors import ConfigError
from zmqengine.option import DAY_MS, DAY_S, MIB, check, option
from zmqengine.protocol.addresses import DEFAULT_NAME, Endpoints, endpoints, is_loopback, resolve
from zmqengine.protocol.messages import CacheScope

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(EngineOptions):
    """The options of one worker. The constructor raises `ConfigError` with what to change.

    Every field that is an `option` is a flag of `zmqengine worker` and a variable of its environment. Those of the
    engine are in `EngineOptions`.
    """

    model: str = option(
        "pico", help="pico, pico-tools, pico-embed, pico-eye, a local directory, or a hub id."
    )
    name: str = option(DEFAULT_NAME, help="What front-ends call this worker on this machine.")
    bind: str | None = option(
        None, help="Where to listen instead: tcp://HOST:PORT (port 0: any free one) or ipc:///DIRECTORY/ctl."
    )
    bind_cmd: str | None = None
    """Address of cmd; with `bind_out`, overrides the one that follows from ctl, so that a restart keeps its ports."""
    bind_out: str | None = None
    memory_total_bytes: int | None = None
    """Memory that all workers of this machine divide, where it is less than what MLX recommends."""
    memory_least_bytes: int | None = None
    """This worker's least share of that, if more than its weights."""
    model_name: str = ""
    """Name of the model for front-ends; empty for that of its directory, or its hub id."""
    engine: str = option("mlx", help="mlx, or fake: and the JSON of a FakeEngineConfig.", hidden=True)

    context_max: int | None = option(
        None,
        within=(2, 1 << 31),
        help="Tokens of prompt and output that one request may hold.",
        otherwise="what the model has",
    )
    growth_tokens: int = option(
        256, within=(8, 1 << 20), help="Memory promised to a row ahead of its output, in tokens."
    )
    prompt_cache_share: float = option(
        0.5,
        within=(0, 1),
        help="Share of the memory left beside the weights for the prefix cache, while running requests do not need it.",
    )
    cache_scope: CacheScope = option(
        "shared",
        help="Who may reuse a cached prompt, unless a request says otherwise: its session, its key, or everybody.",
    )
    memory_limit_bytes: int | None = option(
        None,
        within=(MIB, 1 << 50),
        help="Memory that MLX may use.",
        flag="--memory-limit",
        otherwise="an equal part of what other workers here leave",
    )

    queue_max: int = option(
        1024,
        within=(1, 1_000_000),
        help="Requests that may wait; past it they are refused with a hint when to come back.",
    )
    ageing_s: float = option(
        15.0,
        within=(0, DAY_S),
        help="Requests that more urgent ones have delayed for this long get every 20th start.",
    )
    share: tuple[str, ...] = option(
        (),
        help="A front-end's share of the service, by its name or key:BEGINNING; 'chat*=4'. 1 for all others. "
        "Once for each rule.",
        metavar="NAME=NUMBER",
    )
    priority_min: tuple[str, ...] = option(
        (),
        help="The most urgent priority a front-end may ask for; 'nightly*=1' makes it batch work. -100 for all others.",
        metavar="NAME=NUMBER",
    )
    sessions_max: int = option(256, within=(1, 65_536), help="Front-ends at once.")
    peer_share: float = option(
        0.5,
        within=(0.01, 1),
        help="Share of the sessions that one key or process may have; no bound where neither is known.",
    )
    requests_per_session_max: int = option(
        1024, within=(1, 1_000_000), help="Requests of one front-end at once."
    )
    frame_bytes_max: int = option(16 * MIB, within=(4096, 64 * MIB), help="Longest message from a front-end.")
    token_log_bytes_max: int = option(
        64 * MIB,
        within=(64 * 1024, 1 << 40),
        help="Output kept for one front-end until it has acknowledged it.",
    )
    session_backlog_tokens_max: int = option(
        1_000_000,
        within=(1, 1 << 40),
        help="Tokens that a front-end may fall behind by before its requests end with slow_consumer; a log-probability "
        "counts as one.",
    )
    keep_awake: bool = option(
        True,
        help="Keep the machine from sleeping while requests run, and a minute longer: by a power assertion on macOS, "
        "by systemd-inhibit on Linux.",
    )
    gpu_warm_s: float = option(
        60.0,
        within=(0, DAY_S),
        help="Metal: for how long after the last request tiny products keep the GPU's clock up; 0 for never.",
    )
    lease_ms: int = option(
        60_000, within=(100, DAY_MS), help="Silence after which a front-end counts as gone."
    )
    grace_ms: int = option(
        2_000, within=(0, DAY_MS), help="Time from a lost connection to the end of its requests."
    )

    drain_timeout_s: float = option(
        30.0, within=(0, DAY_S), help="Time for running requests to finish when the worker is told to stop."
    )
    pass_timeout_s: float = option(
        60.0, within=(0, DAY_S), help="A pass of the loop that takes longer ends the process; 0 for never."
    )
    load_timeout_s: float = option(
        600.0,
        within=(0, DAY_S),
        help="Loading or warm-up that makes no progress for this long ends the process; 0 for never.",
    )
    slow_pass_ms: float = option(
        1_000.0, within=(0, DAY_MS), help="A pass of the loop that takes longer is logged, phase by phase."
    )
    engine_failures_max: int = option(
        5, within=(0, 1000), help="Failed steps in the window before the process ends."
    )
    engine_failures_window_s: float = option(
        60.0, within=(0.001, DAY_S), help="The window for --engine-failures-max."
    )

    log_level: LogLevel = option("info", help="How much to log.")
    log_format: LogFormat = option("text", help="How to log.")
    log_prompts: bool = option(
        False, help="Log a few words of a long prompt where it diverges from a cached one."
    )

    supervise: bool = option(
        True, help="Start the worker again when it dies. Turn off under launchd, systemd or a container."
    )
    restarts_max: int = option(5, within=(0, 1_000_000), help="Restarts before giving up.")
    restart_window_s: float = option(
        60.0,
        within=(0.001, DAY_S),
        help="After this long in the ready state, restarts are counted from zero again.",
    )
    restart_wait_ms: int = option(
        100, within=(0, DAY_MS), help="Before the first restart; doubles each time."
    )
    restart_wait_max_ms: int = option(10_000, within=(0, DAY_MS), help="The longest wait before a restart.")
    die_with_parent: bool = option(False, help="Drain when the process that started this one ends.")

    authorized_keys: str | None = option(
        None, help="Directory of the public keys that may connect over tcp; with it CURVE is on."
    )
    server_key: str | None = option(None, help="File of the worker's own secret key.")
    operator_keys: str | None = option(None, help="Directory of the public keys that may drain the worker.")

    fault_drop_frames: float = option(
        0.0,
        within=(0, 0.99),
        help="For tests: the share of token frames that the publisher loses on purpose.",
        hidden=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if "/" in self.name:
            raise ConfigError(f"the name {self.name!r} has a slash: use --bind for an address")
        if not self.model:
            raise ConfigError("--model is empty: give pico, a directory or a hub id")
        if self.engine != "mlx" and not self.engine.startswith("fake:"):
            raise ConfigError(
                f"the engine {self.engine!r} is unknown: it must be mlx, or fake: followed by JSON"
            )
        _check_addresses(self)
        _check_keys(self)
        _ = self.shares, self.priorities_min, self.adapters

    @property
    def shares(self) -> ClientRules:
        """Weights of front-ends in fair scheduling."""
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
    def uses_curve(self) -> bool:
        """Whether a front-end needs a key to connect."""
        return self.server_key is not None

    def pinned(self, real: Endpoints) -> WorkerConfig:
        """A copy bound to the addresses that this worker had before a restart."""
        return dataclasses.replace(self, bind=real.ctl, bind_cmd=real.cmd, bind_out=real.out)

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """The options in `text`. Raises `ConfigError` for a wrong type or an unknown key."""
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            unknown = msgspec.json.decode(text, type=dict[str, object]).keys() - names
            if unknown:
                raise ConfigError(f"unknown worker options: {', '.join(sorted(unknown))}")
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"invalid worker options: {error}") from error


def _check_addresses(config: WorkerConfig) -> None:
    addresses = config.endpoints
    if len({address.split("://")[0] for address in (addresses.ctl, addresses.cmd, addresses.out)}) > 1:
        raise ConfigError(f"{addresses.ctl}, {addresses.cmd} and {addresses.out} are of different kinds")
    for address in (addresses.ctl, addresses.cmd, addresses.out):
        if not is_loopback(address) and not config.uses_curve:
            raise ConfigError(
                f"{address} can be reached from other machines: make keys with `zmqengine keygen` and "
                "give --server-key and --authorized-keys, or bind 127.0.0.1"
            )


def _check_keys(config: WorkerConfig) -> None:
    if (config.authorized_keys is None) != (config.server_key is None):
        raise ConfigError(
            "--authorized-keys and --server-key belong together: make keys with `zmqengine keygen`"
        )
    if config.operator_keys is not None and not config.uses_curve:
        raise ConfigError("--operator-keys needs --server-key and --authorized-keys too")
    if config.uses_curve and config.endpoints.is_ipc:
        raise ConfigError(
            "keys are for tcp; an ipc address is protected by its directory: "
            "leave the key options out or give --bind tcp://HOST:PORT"
        )
