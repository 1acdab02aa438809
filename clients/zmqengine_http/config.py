"""The options of the front-end: from a file, the environment and the command line, the later winning."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from zmqengine.protocol.addresses import resolve
from zmqengine_client.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ENVIRONMENT_PREFIX = "ZMQENGINE_HTTP_"
SECRET = ("api_keys",)

Count = Annotated[int, Meta(ge=1)]


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every option, with its default."""

    workers: tuple[str, ...] = ("default",)
    """Addresses or names of workers. Several of one model share its requests."""
    aliases: dict[str, str] = {}
    """Further names of models, such as {"gpt-4o" = "my-model"}; with `*` a pattern, so that `*` alone is any name."""
    max_tokens_overflow: Literal["cut", "refuse"] = "cut"
    """Whether a max_tokens beyond what the context leaves is cut to that, or a 400."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Whether an unknown field of a request is a 400, or ignored and named in the header x-ignored-fields."""
    constrain_calls: Literal["strict", "always"] = "strict"
    """Which calls are held to their schemas where the model chooses to call: those of strict tools, or all."""
    client_key: str | None = None
    """File of our secret key, for workers on a network; with `server_key`, theirs."""
    server_key: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes any free port; the address is logged."""
    backlog: Annotated[int, Meta(ge=16)] = 2048
    """Connections that may wait to be accepted; the system may hold it lower."""
    api_keys: tuple[Annotated[str, Meta(min_length=8)], ...] = ()
    """Any of them opens /v1, /tokenize and /detokenize. None: no key is asked for."""
    insecure_no_key: bool = False
    """Serve on an address that is not loopback without asking for a key."""
    allow_hosts: tuple[str, ...] = ()
    """Further names in the Host header, on loopback without keys; `*` for any. Its own are always taken."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; `*` for any. None: CORS is off."""
    body_bytes_max: Annotated[int, Meta(ge=1024)] = 16 * 1024 * 1024
    choices_max: Count = 128
    """Choices of one request: n times its prompts."""
    default_temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    """For requests that give none. None: what the model's makers advise, or 1, which is OpenAI's."""
    keepalive_ms: Annotated[int, Meta(ge=100)] = 15_000
    """A stream that has been silent this long gets an SSE comment, so that no proxy gives it up."""
    write_timeout_ms: Annotated[int, Meta(ge=100)] = 30_000
    """A client that takes nothing of its response for this long is given up."""
    probe_ms: Annotated[int, Meta(ge=50)] = 1000
    """How often each worker is asked for its state."""
    drain_ms: Annotated[int, Meta(ge=0)] = 30_000
    """On SIGTERM: how long running answers may go on."""
    tokenize_threads: Count = 2
    stable_head: bool = True
    """Undo what agents change in the heads of their prompts, so that the worker's prompt cache finds them again."""
    tracing: bool = False
    """Send OpenTelemetry traces to $OTEL_EXPORTER_OTLP_ENDPOINT."""
    log_format: Literal["json", "text"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False
    """Log the text of prompts. Off, no log line holds any text of a user."""

    def to_toml(self) -> str:
        """A file that `load` reads back, but for secrets, of which only the number is told."""
        lines = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            hidden = name in SECRET and value
            if value is not None:
                lines.append(f"# {name}: {len(value)} given" if hidden else f"{name} = {_toml(value)}")
        return "\n".join(lines) + "\n"


def load(options: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> HttpConfig:
    """The configuration from a TOML file, `ZMQENGINE_HTTP_*` variables and options, the later winning.

    Options that are None or empty were not given. In the environment a list is separated by commas and aliases are
    `name=model`; `ZMQENGINE_ADDRESS` is the worker if none is given. Raises `ConfigError`, naming what is wrong and
    where it came from.
    """
    merged: dict[str, object] = {}
    if path is not None:
        merged |= _checked(_read_file(path), str(path))
    merged |= _checked(_from_environment(environ), "the environment")
    merged |= _checked(
        {key: value for key, value in options.items() if value not in (None, ())}, "the options"
    )
    if "workers" not in merged and environ.get("ZMQENGINE_ADDRESS"):
        merged["workers"] = (environ["ZMQENGINE_ADDRESS"],)
    config = msgspec.convert(merged, HttpConfig)
    for address in config.workers:
        resolve(address)
    if (config.client_key is None) != (config.server_key is None):
        raise ConfigError("client_key and server_key belong together: give both")
    return config


def _checked(values: dict[str, object], source: str) -> dict[str, object]:
    try:
        msgspec.convert(values, HttpConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).replace('`', '')}") from None
    converted = msgspec.convert(values, HttpConfig, strict=False)
    return {name: getattr(converted, name) for name in values}


def _read_file(path: Path) -> dict[str, object]:
    try:
        values: dict[str, object] = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in HttpConfig.__struct_fields__:
        text = environ.get(ENVIRONMENT_PREFIX + name.upper())
        if not text:
            continue
        parts = [part.strip() for part in text.split(",") if part.strip()]
        default = getattr(HttpConfig(), name)
        if isinstance(default, tuple):
            values[name] = parts
        elif isinstance(default, dict):
            values[name] = alias_pairs(parts)
        else:
            values[name] = text
    return values


def alias_pairs(pairs: list[str] | tuple[str, ...]) -> dict[str, str]:
    """`["name=model", ...]` as a map. Raises `ConfigError`."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, _, model) in zip(pairs, split, strict=True):
        if not name or not model:
            raise ConfigError(f"{pair!r}: an alias is NAME=MODEL")
    return {name: model for name, _, model in split}


def _toml(value: object) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key)} = {json.dumps(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return json.dumps(value)
