"""`zmqengine metrics`: workers for a Prometheus scraper."""

from __future__ import annotations

import contextlib

import click

from zmqengine.cli.connection import connect, launched_models, worker_addresses
from zmqengine.cli.flags import WorkerTarget, several_workers_options
from zmqengine.cli.quantities import Seconds


@click.command()
@several_workers_options
@click.option(
    "--listen", default="127.0.0.1:9464", show_default=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option(
    "--key",
    envvar="ZMQENGINE_METRICS_KEY",
    metavar="KEY",
    help="Ask scrapers for this bearer token. Other users can see options: better in $ZMQENGINE_METRICS_KEY.",
)
@click.option("--once", is_flag=True, help="Print the metrics and exit, without listening.")
@click.option("--timeout", "timeout_s", type=Seconds(0.1), default=2.0, show_default=True)
def metrics(
    addresses: tuple[str, ...],
    client_key: str | None,
    server_key: str | None,
    listen: str,
    key: str | None,
    once: bool,
    timeout_s: float,
) -> None:
    """Serve /metrics of one or several workers, which may start later."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from zmqengine_metrics.exporter import Exporter, WorkersCollector
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[metrics]'") from None
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{listen!r} is not HOST:PORT", param_hint="--listen")
    with contextlib.ExitStack() as stack:
        clients = []
        for name, address in worker_addresses(addresses):
            target = WorkerTarget(address, client_key, server_key)
            client = connect(target, name="metrics", connect_timeout_s=timeout_s, answer_timeout_s=timeout_s)
            clients.append((name, stack.enter_context(client)))
        collector = WorkersCollector(clients, None if addresses else launched_models)
        if once:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(collector)
            click.echo(generate_latest(registry).decode(), nl=False)
            return
        exporter = Exporter(collector, host, int(port), key=key)
        stack.callback(exporter.close)
        click.echo(f"metrics at http://{exporter.address}/metrics", err=True)
        exporter.wait()
