"""The scenarios of `bench schedule` and the measures a short table shows of them."""

SCHEDULE: dict[str, tuple[str, ...]] = {
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
}
