"""`zmqengine serve`: many models behind one command."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zmqengine.cli.quantities import byte_size, shown
from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import base_directory, is_listened_to
from zmqengine.protocol.launcher import DIRECTORY
from zmqengine.python_child import python_command

if TYPE_CHECKING:
    from zmqengine.serve.entries import ModelOffer
    from zmqengine.serve.gateway import GatewayRegistration

HTTP_PORT = 8000
PORT_MAX = 65535


def _http_url(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.match(r"https?://[^\s/]+(/\S*)?$", value):
        raise click.BadParameter(f"{value!r} is not a URL such as http://HOST:30000")
    return value


@click.command()
@click.argument("models", nargs=-1, metavar="[MODELS.toml | DIR | MODEL]...")
@click.option("--host", metavar="HOST", help="Where the HTTP APIs and the page listen.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, PORT_MAX), default=HTTP_PORT, show_default=True)
@click.option("--no-http", is_flag=True, help="No HTTP: programs use the client library alone.")
@click.option(
    "--memory-limit",
    type=byte_size,
    metavar="SIZE",
    help="Memory of all models together, if not what MLX recommends.",
)
@click.option(
    "--cache-dir",
    metavar="DIRECTORY",
    help="Keep prompts on disk, so that a model that was unloaded has them again; auto for the usual place.",
)
@click.option(
    "--gateway",
    callback=_http_url,
    metavar="URL",
    help="Register the models with this SMG gateway, for one address of several machines; see docs/serve.md.",
)
@click.option("--reload", is_flag=True, help="Let the running launcher read its list again, and exit.")
def serve(
    models: tuple[str, ...],
    host: str | None,
    port: int,
    no_http: bool,
    memory_limit: int | None,
    cache_dir: str | None,
    gateway: str | None,
    reload: bool,
) -> int:
    """Serve many models. Each is loaded when a request names it, and unloaded when another needs its memory.

    Without arguments: the bundled models, those in the hub's cache, and those of LM Studio (`zmqengine models` lists
    them). Ctrl-C lets running requests finish. Options of the HTTP front-end come from $ZMQENGINE_HTTP_...
    """
    if reload:
        return _reload()
    from zmqengine.serve.entries import read_offer
    from zmqengine.serve.front_end import HttpFrontEnd
    from zmqengine.serve.launcher import Launcher
    from zmqengine.worker.open_engine import CLAIMS_DIRECTORY
    from zmqengine.worker.process import logs

    logs.set_up("info", "text")
    # That a connection to a worker broke when it was unloaded is no news beside the launcher's own.
    logging.getLogger("zmqengine.client").setLevel(logging.WARNING)
    root = base_directory() / DIRECTORY
    common: dict[str, object] = {} if cache_dir is None else {"cache_dir": cache_dir}
    # The launcher may be started again from another directory.
    sources = [str(Path(source).resolve()) if Path(source).exists() else source for source in models]

    def read() -> ModelOffer:
        return read_offer(sources, root, common, memory_limit)

    offer = read()
    budget = offer.budget_bytes or _machine_bytes()
    if gateway is not None and no_http:
        raise click.UsageError("--gateway needs HTTP: the gateway speaks to it")
    url = "" if no_http else f"http://{host or 'localhost'}:{port}"
    _check_free(root, url, host or "127.0.0.1", port)
    front_end = None if no_http else HttpFrontEnd(root, _http_command(host, port), url)
    click.echo(_greeting(offer, budget, url), err=True)

    async def run() -> int:
        launcher = Launcher(
            root,
            read,
            budget,
            claims=base_directory() / CLAIMS_DIRECTORY,
            front_end=front_end,
            registration=None if gateway is None else _registration(gateway, host, port),
        )
        return await launcher.run()

    return asyncio.run(run())


def _check_free(root: Path, url: str, host: str, port: int) -> None:
    """Raise `ConfigError` if another launcher runs, or another program has the port of HTTP."""
    from zmqengine.serve.front_end import running_url

    if is_listened_to(root / "ctl"):
        raise ConfigError(f"a launcher is already running at {root}: zmqengine status shows its models")
    # A front-end outlives its launcher: the next one takes it over, or ends it.
    if url in ("", running_url(root)) or _is_free(host, port):
        return
    free = next((other for other in range(port + 1, PORT_MAX) if _is_free(host, other)), None)
    advice = "give another --port" + (f", such as --port {free}" if free else "")
    raise ConfigError(f"port {port} of {host} is in use by another program: {advice}")


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return True


def _reload() -> int:
    from zmqengine_client.launcher import AsyncLauncher

    async def ask() -> None:
        async with AsyncLauncher() as launcher:
            await launcher.reload()

    asyncio.run(ask())
    click.echo("the list of models was read again", err=True)
    return 0


def _registration(gateway: str, host: str | None, port: int) -> GatewayRegistration:
    from zmqengine.serve.gateway import GatewayRegistration, address_towards

    keys = os.environ.get("ZMQENGINE_HTTP_API_KEYS", "")
    return GatewayRegistration(gateway, address_towards(gateway, host, port), keys.split(",")[0].strip())


def _http_command(host: str | None, port: int) -> list[str]:
    try:
        import zmqengine_http.server as _  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            f"{error}: install it with pip install 'zmqengine[http]', or give --no-http"
        ) from None
    command = [*python_command("zmqengine.cli.main", "http", "--serve", "--port", str(port))]
    return command if host is None else [*command, "--host", host]


def _machine_bytes() -> int:
    from zmqengine.doctor.machine import look_at_machine

    limit = look_at_machine().limit_bytes
    if not limit:
        raise ConfigError("MLX does not work here, so no model can be loaded: zmqengine doctor says why")
    return limit


def _greeting(offer: ModelOffer, budget: int, url: str) -> str:
    names = [name for name, entry in offer.entries.items() if not entry.never]
    lines = [
        f"models: {', '.join(names[:8]) or 'none'}"
        + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    ]
    if not_loadable := len(offer.entries) - len(names):
        lines.append(f"not loadable: {not_loadable}; `zmqengine models` or `zmqengine status` says why")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A GPU may have memory of its own.
    beyond = f"; this machine has {shown(physical)} beside that of its GPU" if budget > physical else ""
    lines.append(f"memory: {shown(budget)} for all of them{beyond}")
    if url:
        lines.append(f"http: {url} (a page; {url}/v1 for OpenAI's clients)")
    return "\n".join([*lines, f"pid: {os.getpid()}"])
