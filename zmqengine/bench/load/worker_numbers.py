"""Numbers of a worker's passes, for targets with a zmqengine worker behind them."""

from __future__ import annotations

from zmqengine.bench.load.measures import Measures
from zmqengine.errors import ZmqEngineError
from zmqengine_client import AsyncClient

# Distributions over the last thousand passes, and a maximum since the start.
DISTRIBUTIONS = "pass_"
MAXIMA = ("admission_wait_passes_max",)
COUNTERS = ("passes", "slow_passes", "resumes")

Numbers = dict[str, int | float]


class WorkerNumbers:
    """A connection to the control socket of one worker."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, name="zmqengine bench status")

    async def read(self) -> Numbers:
        """The worker's numbers now; empty if it does not answer."""
        try:
            return dict((await self._client.status()).numbers)
        except ZmqEngineError:
            return {}

    async def close(self) -> None:
        await self._client.close()


def figures(before: Numbers, after: Numbers) -> Measures:
    """Distributions and maxima after the work, and the increments of counters during it."""
    measures = {
        name: float(value)
        for name, value in after.items()
        if name.startswith(DISTRIBUTIONS) or name in MAXIMA
    }
    counted = {name: float(after[name] - before.get(name, 0)) for name in COUNTERS if name in after}
    return measures | counted
