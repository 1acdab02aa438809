"""Sizes of the scenarios' work, which `--set NAME=JSON` changes."""

from __future__ import annotations

import msgspec


class ScenarioOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of scenarios. The defaults suit models of a few million parameters and more; `SMALL` is a smoke test."""

    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt_tokens: int = 64
    max_tokens: int = 64
    requests_min: int = 8
    requests_per_user: int = 2
    load_processes: int = 1

    burst_users: int = 4
    burst_requests_per_user: int = 4
    burst_think_s_max: float = 0.25

    interference_streams: int = 4
    interference_prompt_tokens: int = 4096
    interference_stream_tokens: int = 2048
    interference_warm_chunks: int = 24

    prefix_tokens: int = 1024
    prefix_requests: int = 16
    prefix_max_tokens: int = 16

    slots: int = 8
    cancel_max_tokens: int = 384
    cancel_watch_s: float = 2.0

    overload_requests: int = 200
    overload_max_tokens: int = 16

    agents: int = 4
    agent_turns: int = 6
    agent_turn_tokens: int = 96
    agent_max_tokens: int = 48

    two_models_users: int = 8

    front_ends: tuple[int, ...] = (1, 4, 16, 64)
    front_end_requests: int = 1
    front_ends_slow: int = 2
    front_ends_stalled: int = 1
    stall_s: float = 3.0

    chat_users: tuple[int, ...] = (8, 32)
    chat_minutes: int = 2
    chat_minute_s: float = 60.0
    chat_shared_tokens: int = 300
    chat_prompt_tokens_median: int = 400
    chat_prompt_tokens_sigma: float = 0.9
    chat_prompt_tokens_max: int = 3000
    chat_answer_tokens: tuple[int, int] = (24, 320)
    chat_think_s_max: float = 0.3
    chat_temperatures: tuple[float, ...] = (0.0, 0.7)
    chat_top_p: float = 0.95

    trace: str = ""
    trace_speed: float = 1.0

    timeout_s: float = 180.0


SMALL = ScenarioOptions(
    users=(1, 4),
    prompt_tokens=16,
    max_tokens=8,
    requests_min=4,
    requests_per_user=1,
    burst_requests_per_user=2,
    burst_think_s_max=0.02,
    interference_prompt_tokens=256,
    interference_stream_tokens=512,
    interference_warm_chunks=4,
    prefix_tokens=128,
    prefix_requests=3,
    prefix_max_tokens=4,
    slots=4,
    cancel_max_tokens=512,
    cancel_watch_s=0.2,
    overload_requests=40,
    overload_max_tokens=4,
    agents=2,
    agent_turns=2,
    agent_turn_tokens=16,
    agent_max_tokens=4,
    two_models_users=2,
    front_ends=(2,),
    front_end_requests=1,
    front_ends_slow=1,
    front_ends_stalled=1,
    stall_s=0.3,
    chat_users=(3,),
    chat_minutes=2,
    chat_minute_s=1.0,
    chat_shared_tokens=8,
    chat_prompt_tokens_median=12,
    chat_prompt_tokens_max=40,
    chat_answer_tokens=(2, 8),
    chat_think_s_max=0.05,
    trace_speed=20.0,
    timeout_s=60.0,
)
