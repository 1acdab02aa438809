"""The numbers of a worker for people and for Prometheus."""

from __future__ import annotations

import re
import time

from zmqengine.protocol.messages import Status
from zmqengine.worker.telemetry.shared_status import SharedStatus


def status(shared_status: SharedStatus, call: int, *, with_lists: bool = True) -> Status:
    """A snapshot: what the actor wrote after its last pass, and the age of the present one.

    `with_lists` is for operators: sessions and ids of requests are private.
    """
    now_s = time.monotonic()
    times = shared_status.pass_times.numbers() if shared_status.pass_times is not None else {}
    return Status(
        call=call,
        epoch=shared_status.epoch,
        state=shared_status.told_state,
        uptime_s=now_s - shared_status.started_s,
        pass_age_ms=(now_s - shared_status.pass_started_s) * 1000,
        numbers={
            **shared_status.numbers,
            **times,
            "restarts": shared_status.restarts,
            "control_failures": shared_status.control_failures,
        },
        facts=shared_status.facts,
        memory=shared_status.memory,
        histograms=shared_status.histograms,
        sessions=shared_status.sessions if with_lists else [],
        requests=shared_status.requests if with_lists else [],
    )


def prometheus(shared_status: SharedStatus) -> str:
    """Prometheus text exposition format 0.0.4."""
    snapshot = status(shared_status, 0)
    values = {**snapshot.numbers, "uptime_s": snapshot.uptime_s, "pass_age_ms": snapshot.pass_age_ms}
    lines = []
    for name, value in sorted(values.items()):
        metric = "zmqengine_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} {_kind(name)}", f"{metric} {value:.10g}"]
    lines += ["# TYPE zmqengine_state gauge", f'zmqengine_state{{state="{snapshot.state}"}} 1']
    return "\n".join(lines) + "\n"


_COUNTERS = frozenset(
    {
        "passes", "commands", "accepted", "rejected", "resumes", "tokens", "engine_failures", "slow_passes",
        "refused_subscriptions", "steps", "prompt_tokens", "cached_tokens", "generated_tokens", "frames", "lags",
        "restarts", "control_failures", "parked", "tokens_read_again", "vectors",
        "images_seen", "image_pieces",
        "prompt_cache_divergences", "prompt_cache_restored_tokens", "prompt_cache_memory_hit_tokens",
        "prompt_cache_disk_hit_tokens", "prompt_disk_written_blocks", "prompt_disk_read_blocks",
        "prompt_disk_removed_files", "prompt_disk_not_worth",
    }
)  # fmt: skip


def _kind(name: str) -> str:
    counts = (
        "ended_", "prompt_cache_refused_", "prompt_disk_refused_", "prompt_disk_lost_", "prompt_disk_skipped_",
        "drafted_", "drafts_accepted_",
    )  # fmt: skip
    return "counter" if name in _COUNTERS or name.startswith(counts) else "gauge"
