"""The options of the front-end, from a file, the environment and the command line; later sources override."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from zmqengine.option import bound_in_words, check, option, options_of
from zmqengine.protocol.addresses import resolve
from zmqengine_client.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ENVIRONMENT_PREFIX = "ZMQENGINE_HTTP_"
SECRET = ("api_keys", "operator_keys")
Key = Annotated[str, Meta(min_length=8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The configuration of a front-end. Construction raises `ConfigError` with the option to change.

    Every `option` is a flag of `zmqengine http`, an environment variable and a key of its file.
    """

    workers: tuple[str, ...] = option(
        ("default",),
        flag="--worker",
        short="-w",
        metavar="ADDRESS",
        help="Name or address of a worker; repeatable. Several of one model share its requests.",
        otherwise="$ZMQENGINE_ADDRESS, or default",
    )
    serve: bool = option(
        False, help="Serve the models of this user's launcher (zmqengine serve) in place of --worker."
    )
    load_wait_ms: int = option(
        300_000,
        within=(0, None),
        help="With --serve: how long a request waits for its model, in the queue and while it loads; then it gets 503.",
    )
    aliases: dict[str, str] = option(
        {},
        flag="--alias",
        metavar="NAME=MODEL",
        help="Another name for a model, such as gpt-4o=my-model; with * a pattern, so that * alone is any name; "
        "repeatable.",
    )
    max_tokens_overflow: Literal["cut", "refuse"] = option(
        "cut", help="Cut a max_tokens beyond the context to what it leaves, or answer 400."
    )
    unknown_fields: Literal["refuse", "ignore"] = option(
        "refuse",
        help="Answer 400 to an unknown field of a request, or ignore it and name it in the header x-ignored-fields.",
    )
    constrain_calls: Literal["strict", "always"] = option(
        "strict",
        help="Hold calls that the model chooses to make to their schemas: those of strict tools, or always.",
    )
    client_key: str | None = option(
        None,
        metavar="FILE",
        help="This front-end's secret key, for a worker on a network; with --server-key.",
    )
    server_key: str | None = option(None, metavar="FILE", help="The worker's public key, or the key itself.")
    host: str = option("127.0.0.1", help="Where to listen.")
    port: int = option(8000, within=(0, 65535), help="0 takes any free port; the address is logged.")
    processes: int = option(
        1,
        within=(1, 64),
        help="Processes that serve this port, each a session of its own at the worker: for dozens of streams on a fast "
        "GPU, which one process does not carry.",
    )
    backlog: int = option(
        2048,
        within=(16, None),
        help="Connections that may wait to be accepted; the system may hold it lower.",
    )
    api_keys: tuple[Key, ...] = option(
        (),
        flag="--api-key",
        metavar="KEY",
        help="Ask for one of these keys everywhere but at /, /docs, /openapi.json, /health and /ready; repeatable. "
        "Other users can see options: better in the environment or the file.",
    )
    operator_keys: tuple[Key, ...] = option(
        (),
        flag="--operator-key",
        metavar="KEY",
        help="Let these keys alone load and unload adapters and, with --serve, models, pinned ones too, and say how "
        "long they stay; they are accepted as --api-key is; repeatable. Without any, each key loads and unloads all "
        "but pinned models.",
    )
    adapter_dir: str | None = option(
        None,
        metavar="DIR",
        help="Let requests load LoRA adapters from directories below this one, on the worker's machine; an operator's "
        "key may from any.",
        otherwise="none",
    )
    insecure_no_key: bool = option(False, help="Serve on a network without asking for a key.")
    allow_hosts: tuple[str, ...] = option(
        (),
        flag="--allow-host",
        metavar="NAME",
        help="A further name that this server is reached by; repeatable, * for any. Without keys, requests for other "
        "names are refused: a web page could have brought them.",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        flag="--cors-origin",
        metavar="ORIGIN",
        help="Let browsers call from here; repeatable, * for any. Off by default.",
    )
    body_bytes_max: int = option(
        16 << 20,
        within=(1024, None),
        help="Longest request body. Those of all requests that have not ended take at most 32 times as much.",
    )
    choices_max: int = option(128, within=(1, None), help="Choices of one request: n times its prompts.")
    default_temperature: float | None = option(
        None,
        within=(0, 2),
        help="For requests that give none.",
        otherwise="what the model's makers advise, or 1, which is OpenAI's",
    )
    keepalive_ms: int = option(
        15_000,
        within=(100, None),
        help="A stream that has been silent this long gets an SSE comment, so that proxies keep it open.",
    )
    write_timeout_ms: int = option(
        30_000,
        within=(100, None),
        help="A client that reads nothing of its response for this long is disconnected.",
    )
    probe_ms: int = option(1000, within=(50, None), help="How often each worker is asked for its state.")
    drain_ms: int = option(30_000, within=(0, None), help="On SIGTERM: how long running answers may go on.")
    tokenize_threads: int = option(2, within=(1, None), help="Threads that turn text into tokens.")
    stable_head: bool = option(
        True,
        help="Undo what agents change in the heads of their prompts, so that the worker's prompt cache finds them "
        "again.",
    )
    image_urls: bool = option(
        False,
        help="Fetch images behind http and https URLs of a request, from public addresses alone; otherwise a 400.",
    )
    tracing: bool = option(False, help="Send OpenTelemetry traces to $OTEL_EXPORTER_OTLP_ENDPOINT.")
    log_format: Literal["auto", "json", "text"] = option(
        "auto", help="How to log; auto is text on a terminal and JSON elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help="How much to log.")
    log_prompts: bool = option(
        False, help="Log the text of prompts. Otherwise no log line holds any text of a user."
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are accepted; without any, everybody is."""
        return (*self.api_keys, *self.operator_keys)

    def to_toml(self) -> str:
        """A file that `load` reads back. Secrets are left out; a comment says how many there are."""
        lines = []
        for name, value in _values(self).items():
            hidden = name in SECRET and value
            if value is not None:
                lines.append(f"# {name}: {len(value)} given" if hidden else f"{name} = {_toml(value)}")
        return "\n".join(lines) + "\n"


def load(options: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> HttpConfig:
    """The configuration from a TOML file, `ZMQENGINE_HTTP_*` variables and options; later sources override.

    Options that are None or empty count as not given. In the environment lists are separated by commas and
    aliases are `name=model`; `ZMQENGINE_ADDRESS` is the default worker. Raises `ConfigError` with the invalid
    option and its source.
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
    unknown = values.keys() - _values(HttpConfig()).keys()
    if unknown:
        raise ConfigError(f"{source}: unknown options: {', '.join(sorted(unknown))}")
    try:
        converted = msgspec.convert(values, HttpConfig, strict=False)
    except msgspec.ValidationError as error:
        bound = bound_in_words(str(error))
        flag = next((each.flag for each in options_of(HttpConfig) if bound and each.name == bound[0]), None)
        said = f"{flag} {bound[1]}" if bound and flag else str(error).replace("`", "")
        raise ConfigError(f"{source}: {said}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return {name: getattr(converted, name) for name in values}


def _values(config: HttpConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _read_file(path: Path) -> dict[str, object]:
    try:
        values: dict[str, object] = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, default in _values(HttpConfig()).items():
        text = environ.get(ENVIRONMENT_PREFIX + name.upper())
        if not text:
            continue
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if isinstance(default, tuple):
            values[name] = parts
        elif isinstance(default, dict):
            values[name] = alias_pairs(parts)
        else:
            values[name] = text
    return values


def alias_pairs(pairs: list[str] | tuple[str, ...]) -> dict[str, str]:
    """`["name=model", ...]` as a dictionary. Raises `ConfigError`."""
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
