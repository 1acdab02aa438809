"""Sorts the rows that decode into batches of about the same length.

Every row of a batch takes as much memory, and as much reading at each step, as its longest row. So a row of
30,000 tokens gets a batch of its own when padding the others to its length would cost more than a second call.
Rows of a batch grow alike: what padding there is when a row joins does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqengine.engine.decode import DecodeBatch
from zmqengine.engine.interface import StepResult
from zmqengine.engine.row import Caches, Row


class Lanes:
    """The rows that decode, in as few batches as `padding_bytes_max` of padding in each allows.

    `token_bytes` is what one more token of a row takes in the caches.
    """

    def __init__(
        self, new_lane: Callable[[], DecodeBatch], token_bytes: float, padding_bytes_max: int
    ) -> None:
        self._new_lane = new_lane
        self._token_bytes = token_bytes
        self._padding_bytes_max = padding_bytes_max
        self._lanes: list[DecodeBatch] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def busy(self) -> bool:
        """Whether a row decodes."""
        return any(lane.rows for lane in self._lanes)

    @property
    def caches(self) -> Caches:
        """The caches of all batches."""
        return [cache for lane in self._lanes for cache in lane.caches]

    def join(self, rows: Sequence[Row], caches: Caches) -> None:
        """Add rows to the batch where they cost the least padding, or to a new one."""
        costs = [self._padding_bytes(lane.rows, rows) for lane in self._lanes]
        if costs and min(costs) <= self._padding_bytes_max:
            lane = self._lanes[costs.index(min(costs))]
        else:
            lane = self._new_lane()
            self._lanes.append(lane)
        lane.join(rows, caches)

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; those that are not here are ignored."""
        for lane in self._lanes:
            lane.leave(rows)

    def next(self, result: StepResult) -> None:
        """Start the next step of every batch, and report the tokens of the step before."""
        for lane in self._lanes:
            lane.launch()
        for lane in self._lanes:
            lane.land(result)
        self._lanes = [lane for lane in self._lanes if not lane.idle]

    def _padding_bytes(self, rows: Sequence[Row], others: Sequence[Row]) -> float:
        held = [row.held for row in rows] + [row.held for row in others]
        return (max(held) * len(held) - sum(held)) * self._token_bytes
