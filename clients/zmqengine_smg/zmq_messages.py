"""The messages of the gateway's direct ZeroMQ wire, which is that of vLLM's EngineCore.

Source: https://github.com/lightseekorg/smg, crates/engine_zmq_client; checked against gateway 1.13. Requests
and outputs are msgpack arrays, so fields are known by position, and both sides may append fields. The
handshake and the sampling parameters are maps.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

ADD, ABORT, START_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
"""The first frame of a message from the gateway."""

DEAD = b"ENGINE_CORE_DEAD"
"""An output of this one frame ends the connection: the gateway fails the running requests and waits for a
handshake."""

STOP, LENGTH, ABORTED, ERROR = 0, 1, 2, 3
"""Finish reasons."""

RAW_VIEW = 3
"""The msgpack extension that holds the bytes of an array."""


# --- handshake ---------------------------------------------------------------------------------------------


class Handshake(Struct, frozen=True):
    """HELLO and READY, from the engine."""

    status: str
    local: bool = True
    headless: bool = True


class Addresses(Struct, frozen=True):
    """The gateway's sockets: requests come from `inputs`, results go to `outputs`; we use the first of
    each."""

    inputs: list[str]
    outputs: list[str]


class Init(Struct, frozen=True):
    """The gateway's answer to HELLO."""

    addresses: Addresses


class Registration(Struct, frozen=True):
    """The engine's limits, its first message on the input socket. The model is on one machine: no parallel
    ranks."""

    max_model_len: int
    max_num_seqs: int
    instance_id: str
    num_gpu_blocks: int = 0
    block_size: int = 1
    dp_stats_address: str | None = None
    dtype: str = "float32"
    vllm_version: str = "zmqengine"
    world_size: int = 1
    data_parallel_size: int = 1


# --- from the gateway --------------------------------------------------------------------------------------


class Add(Struct, frozen=True, array_like=True):
    """A request. Most fields after `sampling_params` are refused if set."""

    request_id: str
    prompt_token_ids: list[int] | None = None
    mm_features: Any = None
    sampling_params: dict[str, Any] | None = None
    pooling_params: Any = None
    arrival_time: float = 0.0
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False


class UtilityCall(Struct, frozen=True, array_like=True):
    """A call of a method of the engine by its name."""

    client_index: int
    call_id: int
    method: str
    arguments: Any = None


# --- to the gateway ----------------------------------------------------------------------------------------


class Array(Struct, frozen=True, array_like=True):
    """A numpy array: dtype string, shape, and bytes in a `RAW_VIEW`."""

    dtype: str
    shape: list[int]
    data: msgspec.msgpack.Ext


class Logprobs(Struct, frozen=True, array_like=True):
    """One row per token: the token, then the most probable ones; ids, natural logarithms, and the token's own
    rank."""

    token_ids: Array
    logprobs: Array
    ranks: Array
    cu_num_generated_tokens: None = None


class PrefillStats(Struct, frozen=True):
    """Prefill counts of a request, sent with its first output."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int


class Output(Struct, frozen=True, array_like=True):
    """New tokens of one request, its end, or both. `stop_reason` is the stop token that ended it, or the
    error text."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    new_prompt_logprobs: None = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None


class CacheStats(Struct, frozen=True):
    """Prefix-cache hits since the last report: always zero, as outputs carry their own counts."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SchedulerStats(Struct, frozen=True):
    """The worker's load, by which the gateway balances."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    prefix_cache_stats: CacheStats = CacheStats()
    connector_prefix_cache_stats: None = None
    kv_cache_eviction_events: tuple[()] = ()
    spec_decoding_stats: None = None
    kv_connector_stats: None = None
    cudagraph_stats: None = None
    perf_stats: None = None


class UtilityOutput(Struct, frozen=True, array_like=True):
    """The answer to a `UtilityCall`; every call is refused, in `failure`."""

    call_id: int
    failure: str | None
    result: None = None


class Outputs(Struct, frozen=True, array_like=True):
    """New output of all requests, and the load if it changed; or the answer to a call."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
