"""Niceness of this process on macOS, where it decides whose work the GPU ends."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("zmqengine.worker")


def nice_facts() -> dict[str, str]:
    """`nice` of this process where it gives way to others, with a warning in the log; empty elsewhere.

    macOS 27 has ended GPU work of processes beside others of higher priority, as timeouts
    (github.com/jundot/omlx/issues/3706).
    """
    nice = os.nice(0)
    if sys.platform != "darwin" or nice <= 0:
        return {}
    log.warning(
        "macOS may end this worker's work on the GPU beside programs of higher priority: start it without nice; "
        "zsh starts what ends in & with nice 5, unless `setopt no_bg_nice`",
        extra={"nice": nice},
    )
    return {"nice": str(nice)}
