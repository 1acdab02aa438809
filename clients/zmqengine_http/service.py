"""What the endpoints share."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine_http.config import HttpConfig
from zmqengine_http.meter import Meter
from zmqengine_http.pool import Pool
from zmqengine_http.prompts import Tokenizing
from zmqengine_http.stable_head import StableHead
from zmqengine_http.tracing import Traces


class Service(NamedTuple):
    """The options, the workers, the threads that tokenise, and what keeps the heads of prompts alike."""

    config: HttpConfig
    pool: Pool
    tokenizing: Tokenizing
    head: StableHead
    meter: Meter
    traces: Traces
