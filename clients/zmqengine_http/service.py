"""What the endpoints share."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine_http.config import HttpConfig
from zmqengine_http.prompt.prompts import Tokenizing
from zmqengine_http.serving.meter import Meter
from zmqengine_http.serving.tracing import Traces
from zmqengine_http.stable_head import StableHead
from zmqengine_http.workers.pool import Pool


class Service(NamedTuple):
    """The options, the workers, the threads that tokenise, and what keeps the heads of prompts alike."""

    config: HttpConfig
    pool: Pool
    tokenizing: Tokenizing
    head: StableHead
    meter: Meter
    traces: Traces
