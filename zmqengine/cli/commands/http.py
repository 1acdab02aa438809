"""`zmqengine http`: the OpenAI-compatible front-end."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zmqengine.cli.config_flags import flags_of

try:
    from zmqengine_http import config
except ImportError as error:
    raise click.ClickException(f"{error}: install it with pip install 'zmqengine[http]'") from None


@flags_of(config.HttpConfig)
@click.command()
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    help="A TOML file of these options. [env: ZMQENGINE_HTTP_CONFIG]",
)
@click.option("--print-config", is_flag=True, help="Print the effective options, as such a file, and exit.")
def http(path: Path | None, print_config: bool, aliases: tuple[str, ...], **options: object) -> int:
    """Serve the OpenAI and Anthropic APIs in front of workers, which may start later.

    Every option can also be set in the environment, as ZMQENGINE_HTTP_<OPTION> with lists separated by commas, and in
    the file. Options win over the environment, and the environment over the file.
    """
    options["aliases"] = config.alias_pairs(aliases) or None
    config_text = os.environ.get("ZMQENGINE_HTTP_CONFIG")
    loaded = config.load(options, os.environ, path or (Path(config_text) if config_text else None))
    if print_config:
        click.echo(loaded.to_toml(), nl=False)
        return 0
    from zmqengine_http import server

    return server.serve(loaded)
