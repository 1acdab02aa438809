"""What the endpoints share."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine_http.config import HttpConfig
from zmqengine_http.pool import Pool
from zmqengine_http.prompts import Tokenizing


class Service(NamedTuple):
    """The options, the workers, and the threads that tokenise."""

    config: HttpConfig
    pool: Pool
    tokenizing: Tokenizing
