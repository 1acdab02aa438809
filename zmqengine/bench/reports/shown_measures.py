"""Measures in the short table of each scenario, the most important first."""

from __future__ import annotations

SHOWN: dict[str, tuple[str, ...]] = {
    "overhead": (
        "tokens_per_s",
        "ttft_p50_ms",
        "ttft_max_ms",
        "itl_p99_ms",
        "pass_outside_us_p50",
        "server_cpu_per_token_us",
        "front_end_cpu_per_token_us",
        "client_cpu_per_token_us",
    ),
    "admission": ("admission_wait_passes_max", "ttft_p50_ms", "ttft_max_ms"),
    "idle": ("idle_cpu_percent",),
    "all rows": ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "server_cpu_per_token_us"),
    "half of the rows": ("tokens_per_s", "itl_p50_ms", "itl_p99_ms"),
    "first token": ("ttft_p50_ms", "ttft_p90_ms"),
    "hostile": ("silence_max_ms",),
    "JSON mode over HTTP": ("tokens_per_s", "ttft_p50_ms"),
    "first": (
        "ttft_first_ms",
        "ttft_tenth_ms",
        "ttft_median_ms",
        "ttft_rested_ms",
        "ttft_idle_ms",
        "clock_before_mhz",
        "clock_tenth_mhz",
    ),
    "saving": ("tokens_per_s", "wall_s", "written_bytes"),
    "schedule": ("wait_p50_s", "wait_p90_s", "wait_p99_s", "wait_max_s"),
    "service": (
        "tokens_per_s",
        "jain",
        "parked",
        "displaced",
        "reread_tokens",
        "aged_starts",
        "waiting_max",
        "estimate_to_wait",
    ),
    "calls": ("enqueue_us", "first_us", "start_us", "charge_us", "park_us", "withdraw_us"),
    **dict.fromkeys(
        ("echo", "edit", "edit draft", "new text", "sampled text", "set drafts", "draft model"),
        ("tokens_per_s", "full_tokens_per_s", "steps_per_token", "accepted_share"),
    ),
}
