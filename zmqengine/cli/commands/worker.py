"""`zmqengine worker`: the options of `WorkerConfig` as flags."""

from __future__ import annotations

from typing import Any

import click

from zmqengine.cli.config_flags import flags_of
from zmqengine.cli.flags import given
from zmqengine.config import WorkerConfig


@flags_of(WorkerConfig)
@click.command(context_settings={"auto_envvar_prefix": "ZMQENGINE_WORKER"})
def worker(**options: Any) -> int:
    """Load a model and share it with every program that connects.

    Without options: the bundled model pico, for the programs of this user on this machine. Every option
    can come from the environment: --queue-max is ZMQENGINE_WORKER_QUEUE_MAX. SIGTERM and Ctrl-C let
    running requests finish; a second one ends the worker at once.
    """
    config = WorkerConfig(**given(options))
    from zmqengine.worker.process.logs import set_up

    set_up(config.log_level, config.log_format)
    if not config.supervise:
        from zmqengine.worker.main import serve

        return serve(config)
    from zmqengine.worker.process.parent import EXIT_HOPELESS
    from zmqengine.worker.process.supervisor import supervise

    code = supervise(config)
    # The code is for service managers, which run the worker without our supervisor.
    return 1 if code == EXIT_HOPELESS else code
