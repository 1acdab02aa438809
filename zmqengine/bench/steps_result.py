"""What `zmqengine.bench.steps` prints."""

from __future__ import annotations

import msgspec


class StepsResult(msgspec.Struct, kw_only=True):
    """Milliseconds of a step, by what it is a step of: the median, as the host sees it.

    `parts` splits steps of 32 rows into what the host does before it starts a step, starting it, and waiting.
    `changes_ms` is what one more row costs in a batch of so many, beside their steps: when it joins, its prompt
    included, and when it ends. `operations` are those of MLX that are started in a step, and for such a change.
    `widths` are calls of the model: by rows, what each width costs relative to width 1, with its milliseconds.
    """

    facts: dict[str, str] = {}
    open_s: float = 0.0
    step_ms: dict[str, float] = {}
    parts_ms: dict[str, dict[str, float]] = {}
    changes_ms: dict[str, dict[str, float]] = {}
    operations: dict[str, dict[str, float]] = {}
    widths: dict[str, dict[str, float]] = {}
    width_one_ms: dict[str, float] = {}
