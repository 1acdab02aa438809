"""`zmqengine http`: the OpenAI-compatible front-end."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command()
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="ADDRESS",
    help="Name or address of a worker; repeatable. [default: $ZMQENGINE_ADDRESS, or default]",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME=MODEL",
    help="Another name for a model, * for any; repeatable.",
)
@click.option(
    "--max-tokens-overflow",
    type=click.Choice(["cut", "refuse"]),
    help="What to do with a max_tokens beyond the context. [default: cut]",
)
@click.option(
    "--unknown-fields",
    type=click.Choice(["refuse", "ignore"]),
    help="What to do with request fields that are not known. [default: refuse]",
)
@click.option(
    "--constrain-calls",
    type=click.Choice(["strict", "always"]),
    help="Hold calls that the model chooses to make to their schemas: of strict tools, or always. [default: strict]",
)
@click.option("--host", help="Where to listen. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes any free port. [default: 8000]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Ask for one of these keys; repeatable. Other users can see options: better in the environment or the file.",
)
@click.option(
    "--insecure-no-key", is_flag=True, default=None, help="Serve on a network without asking for a key."
)
@click.option(
    "--tracing", is_flag=True, default=None, help="Send OpenTelemetry traces to $OTEL_EXPORTER_OTLP_ENDPOINT."
)
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="A further name that this server is reached by; repeatable, * for any. "
    "Without keys, requests for other names are refused: a web page could have brought them.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let browsers call from here; repeatable. Off by default.",
)
@click.option(
    "--default-temperature",
    type=click.FloatRange(0, 2),
    help="For requests that give none. [default: the model's own, or 1]",
)
@click.option(
    "--body-bytes-max", type=click.IntRange(min=1024), help="Longest request body. [default: 16 MiB]"
)
@click.option("--client-key", metavar="FILE", help="This front-end's secret key, for a worker on a network.")
@click.option("--server-key", metavar="FILE", help="The worker's public key, or the key itself.")
@click.option(
    "--stable-head/--no-stable-head",
    default=None,
    help="Undo what agents change in the heads of their prompts, for the prompt cache. On by default.",
)
@click.option("--log-format", type=click.Choice(["json", "text"]), help="[default: json]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--log-prompts/--no-log-prompts", default=None, help="Log the text of prompts. Off by default.")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    help="A TOML file of these and further options. [env: ZMQENGINE_HTTP_CONFIG]",
)
@click.option("--print-config", is_flag=True, help="Print the options in force, as such a file, and exit.")
def http(path: Path | None, print_config: bool, aliases: tuple[str, ...], **options: object) -> int:
    """Serve the OpenAI API, in front of workers that run already or will.

    Every option can stand in the environment as ZMQENGINE_HTTP_<OPTION>, lists separated by commas, and in the file.
    An option wins over the environment, and that over the file.
    """
    try:
        from zmqengine_http import config, server
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[http]'") from None
    options["aliases"] = config.alias_pairs(aliases) or None
    given = os.environ.get("ZMQENGINE_HTTP_CONFIG")
    loaded = config.load(options, os.environ, path or (Path(given) if given else None))
    if print_config:
        click.echo(loaded.to_toml(), nl=False)
        return 0
    return server.serve(loaded)
