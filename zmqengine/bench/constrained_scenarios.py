"""The scenarios of `bench constrained` and the measures a short table shows of them."""

CONSTRAINED: dict[str, tuple[str, ...]] = {
    "all rows": ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "server_cpu_per_token_us"),
    "half of the rows": ("tokens_per_s", "itl_p50_ms", "itl_p99_ms"),
    "first token": ("ttft_p50_ms", "ttft_p90_ms"),
    "hostile": ("silence_max_ms",),
    "JSON mode over HTTP": ("tokens_per_s", "ttft_p50_ms"),
}
