"""The scenarios that only `bench gpu` has, and the measures a short table shows of them."""

GPU: dict[str, tuple[str, ...]] = {
    "first": (
        "ttft_first_ms",
        "ttft_tenth_ms",
        "ttft_median_ms",
        "ttft_rested_ms",
        "ttft_idle_ms",
        "clock_before_mhz",
        "clock_tenth_mhz",
    ),
    "steps": ("step_ms", "open_s"),
    "step parts": ("step_ms", "start_ms", "wait_ms", "build_and_report_ms"),
    "changes": ("step_ms", "join_ms", "end_ms"),
    "operations": ("step_operations", "join_operations", "end_operations"),
    "widths": ("width_1_ms", *(f"width_{width}_cost" for width in (2, 3, 4, 6, 8))),
}
