"""`zmqengine smg`: a worker as an engine of the SMG gateway."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from zmqengine.cli.connection import keys_of
from zmqengine.cli.flags import WorkerTarget, worker_options
from zmqengine.cli.quantities import Seconds


@click.command()
@worker_options
@click.option("--listen", metavar="HOST:PORT", help="Serve the gateway's MLX gRPC service here.")
@click.option(
    "--engine", metavar="ipc://PATH", help="Connect to the gateway on this machine that has this worker URL."
)
@click.option(
    "--insecure-no-key", is_flag=True, help="Let --listen be reached from other machines, without any key."
)
@click.option(
    "--tokenizer-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the worker's tokenizer here, for the gateway's --model-path.",
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
    listen: str | None,
    engine: str | None,
    insecure_no_key: bool,
    tokenizer_dir: Path | None,
    patience: float,
    drain: float,
    log_level: str,
) -> None:
    """Be an engine of the SMG gateway, in front of one worker, which may start later.

    Over gRPC (--listen), for `smg launch --worker-urls grpc://HOST:PORT`; or over ZeroMQ (--engine), on the gateway's
    machine, for `smg launch --backend vllm --worker-urls ipc://PATH --model-path DIR`. Run one for each worker.
    """
    try:
        from zmqengine_smg import SmgConfig, run

        config = SmgConfig(
            worker=target.address,
            keys=keys_of(target),
            listen=listen,
            engine=engine,
            insecure_no_key=insecure_no_key,
            tokenizer_directory=tokenizer_dir,
            patience_s=patience,
            drain_s=drain,
        )
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        # This imports the packages of the chosen wire.
        asyncio.run(run(config))
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[smg]'") from None
