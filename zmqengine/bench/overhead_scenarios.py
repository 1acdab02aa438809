"""The scenarios of `bench overhead` and the measures a short table shows of them."""

OVERHEAD: dict[str, tuple[str, ...]] = {
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
}
