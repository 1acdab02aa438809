"""`zmqengine smg`: a worker as an engine of the SMG gateway."""

from __future__ import annotations

import asyncio
import logging

import click

from zmqengine.cli.connection import keys_of
from zmqengine.cli.flags import WorkerTarget, worker_options
from zmqengine.cli.quantities import Seconds


@click.command()
@worker_options
@click.option(
    "--listen", metavar="HOST:PORT", required=True, help="Serve the gateway's MLX gRPC service here."
)
@click.option(
    "--insecure-no-key", is_flag=True, help="Let --listen be reached from other machines, without any key."
)
@click.option(
    "--patience",
    type=Seconds(0),
    default=60,
    show_default=True,
    help="Seconds that requests wait for a worker that has died.",
)
@click.option(
    "--drain",
    type=Seconds(0),
    default=30,
    show_default=True,
    help="Seconds that requests may go on after SIGTERM.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def smg(
    target: WorkerTarget,
    listen: str,
    insecure_no_key: bool,
    patience: float,
    drain: float,
    log_level: str,
) -> None:
    """Be an engine of the SMG gateway, in front of one worker, which may start later.

    For `smg launch --worker-urls grpc://HOST:PORT`. Run one for each worker.
    """
    try:
        from zmqengine_smg import SmgConfig, run

        config = SmgConfig(
            worker=target.address,
            keys=keys_of(target),
            listen=listen,
            insecure_no_key=insecure_no_key,
            patience_s=patience,
            drain_s=drain,
        )
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        asyncio.run(run(config))
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[smg]'") from None
