"""The table of metrics: a worker's status numbers to names and units of Prometheus's conventions."""

from __future__ import annotations

from typing import NamedTuple


class Plain(NamedTuple):
    """A metric of one number, or of the sum of two."""

    name: str
    help: str
    number: str
    plus: str = ""


class ByLabel(NamedTuple):
    """A metric of several numbers, distinguished by a label."""

    name: str
    help: str
    label: str
    numbers: dict[str, str]
    """Label value to number name."""


class Distribution(NamedTuple):
    """A metric of one histogram."""

    name: str
    help: str
    histogram: str


GAUGES = (
    Plain("zmqengine_requests_running", "Requests that have a row in the batch.", "running"),
    Plain("zmqengine_requests_waiting", "Requests that wait for a row.", "queued"),
    Plain("zmqengine_requests_parked", "Requests that had a row and wait for another one.", "parked_now"),
    Plain("zmqengine_requests_held", "Requests not yet acknowledged, those that ended included.", "requests_held"),
    Plain("zmqengine_sessions", "Front-ends that are connected.", "sessions"),
    Plain("zmqengine_token_log_bytes", "Tokens kept until front-ends acknowledge them.", "log_bytes"),
    Plain("zmqengine_kv_reserved_bytes", "KV cache reserved for running requests.", "kv_projected_bytes"),
    Plain("zmqengine_kv_limit_bytes", "Limit of the KV cache that can be reserved.", "kv_bytes_max"),
    Plain("zmqengine_prompt_cache_entries", "Prompts in the prefix cache.", "prompt_cache_entries"),
    Plain("zmqengine_prompt_cache_pinned_bytes", "Pinned bytes of the prefix cache.", "prompt_cache_pinned_bytes"),
    Plain("zmqengine_prompt_disk_bytes", "Bytes of files in --cache-dir, of all workers.", "prompt_disk_bytes"),
    Plain("zmqengine_prompt_disk_blocks", "Blocks of this model in --cache-dir.", "prompt_disk_blocks"),
    Plain(
        "zmqengine_prompt_disk_written_today_bytes", "Bytes that this worker wrote to --cache-dir since midnight UTC.",
        "prompt_disk_written_today_bytes",
    ),
    Plain("zmqengine_memory_peak_bytes", "Peak of the memory in use.", "peak_bytes"),
)  # fmt: skip

LABELLED_GAUGES = (
    ByLabel(
        "zmqengine_rows", "Rows of the batch by what they do.", "phase",
        {"prefill": "rows_prefilling", "decode": "rows_decoding"},
    ),
)  # fmt: skip

COUNTERS = (
    Plain("zmqengine_passes", "Passes of the worker's loop.", "passes"),
    Plain("zmqengine_steps", "Steps of the engine: each makes a token for every row that decodes.", "steps"),
    Plain("zmqengine_commands", "Commands from front-ends.", "commands"),
    Plain("zmqengine_requests_accepted", "Requests that were accepted.", "accepted"),
    Plain("zmqengine_commands_rejected", "Commands that were refused.", "rejected"),
    Plain("zmqengine_resumes", "Streams that asked for lost tokens again.", "resumes"),
    Plain("zmqengine_parkings", "Times that a request lost its row, to memory or to another request.", "parked"),
    Plain("zmqengine_engine_failures", "Steps that raised.", "engine_failures"),
    Plain("zmqengine_slow_passes", "Passes that took longer than --slow-pass-ms.", "slow_passes"),
    Plain(
        "zmqengine_prompt_divergences", "Long prompts that went on differently from a kept one.",
        "prompt_cache_divergences",
    ),
    Plain("zmqengine_frames", "Frames published.", "frames"),
    Plain("zmqengine_session_lags", "Times that a front-end could not take its frame.", "lags"),
    Plain("zmqengine_worker_restarts", "Times that the supervisor started the worker again.", "restarts"),
)  # fmt: skip

LABELLED_COUNTERS = (
    ByLabel(
        "zmqengine_tokens", "Tokens by kind: read from prompts, served from the prompt cache, read again, made.",
        "kind",
        {
            "prompt": "prompt_tokens", "cached": "cached_tokens", "read_again": "tokens_read_again",
            "generated": "generated_tokens",
        },
    ),
    ByLabel(
        "zmqengine_prompt_cache_hit_tokens", "Prompt tokens served from the prefix cache, by tier.", "tier",
        {"memory": "prompt_cache_memory_hit_tokens", "disk": "prompt_cache_disk_hit_tokens"},
    ),
    ByLabel(
        "zmqengine_prompt_disk_moved_blocks", "Blocks of prompts written to --cache-dir and read from it.", "way",
        {"written": "prompt_disk_written_blocks", "read": "prompt_disk_read_blocks"},
    ),
    ByLabel(
        "zmqengine_prompt_disk_unwritten_blocks", "Blocks of prompts that were not written, by reason.", "reason",
        {
            "room": "prompt_disk_refused_room", "daily_writes": "prompt_disk_refused_daily_writes",
            "error": "prompt_disk_refused_error", "slow_disk": "prompt_disk_lost_slow_disk",
        },
    ),
    ByLabel(
        "zmqengine_prompt_disk_skipped_files", "Files in --cache-dir that were skipped, by fault.", "fault",
        {"torn": "prompt_disk_skipped_torn", "newer": "prompt_disk_skipped_newer"},
    ),
    ByLabel(
        "zmqengine_drafted_tokens", "Draft tokens, by source.", "source",
        {
            "ngram": "drafted_ngram", "draft": "drafted_draft", "grammar": "drafted_grammar",
            "prediction": "drafted_prediction",
        },
    ),
    ByLabel(
        "zmqengine_drafted_tokens_accepted", "Draft tokens that were accepted, by source.", "source",
        {
            "ngram": "drafts_accepted_ngram", "draft": "drafts_accepted_draft",
            "grammar": "drafts_accepted_grammar", "prediction": "drafts_accepted_prediction",
        },
    ),
)  # fmt: skip

DISTRIBUTIONS = (
    Distribution("zmqengine_queue_seconds", "From acceptance to a row.", "queue_s"),
    Distribution("zmqengine_prefill_seconds", "From a row to the first token.", "prefill_s"),
    Distribution(
        "zmqengine_time_to_first_token_seconds",
        "From acceptance to the first token.",
        "time_to_first_token_s",
    ),
    Distribution(
        "zmqengine_inter_token_seconds", "Between neighbouring tokens of a request.", "inter_token_s"
    ),
    Distribution("zmqengine_request_seconds", "From acceptance to the terminal answer.", "request_s"),
    Distribution("zmqengine_step_seconds", "One step of the engine, prefill included.", "step_s"),
    Distribution("zmqengine_request_prompt_tokens", "Prompt tokens of a request.", "prompt_tokens"),
    Distribution("zmqengine_request_output_tokens", "Output tokens of a request.", "output_tokens"),
)

# vLLM's names of the same metrics, for dashboards made for vLLM.
VLLM_GAUGES = (
    Plain("vllm:num_requests_running", "zmqengine_requests_running, by vLLM's name.", "running"),
    Plain("vllm:num_requests_waiting", "zmqengine_requests_waiting, by vLLM's name.", "queued"),
)
VLLM_COUNTERS = (
    Plain(
        "vllm:prompt_tokens", "Prompt tokens read or served from the cache, by vLLM's name.",
        "prompt_tokens", "cached_tokens",
    ),
    Plain("vllm:generation_tokens", "Tokens made, by vLLM's name.", "generated_tokens"),
    Plain(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prompt cache, by vLLM's name.",
        "prompt_tokens", "cached_tokens",
    ),
    Plain("vllm:prefix_cache_hits", "Prompt tokens found there, by vLLM's name.", "cached_tokens"),
    Plain("vllm:num_preemptions", "zmqengine_parkings, by vLLM's name.", "parked"),
)  # fmt: skip
VLLM_DISTRIBUTIONS = (
    Distribution("vllm:time_to_first_token_seconds", "zmqengine's, by vLLM's name.", "time_to_first_token_s"),
    Distribution("vllm:inter_token_latency_seconds", "zmqengine's, by vLLM's name.", "inter_token_s"),
    Distribution("vllm:time_per_output_token_seconds", "By vLLM's older name.", "inter_token_s"),
    Distribution("vllm:e2e_request_latency_seconds", "zmqengine's, by vLLM's name.", "request_s"),
    Distribution("vllm:request_queue_time_seconds", "zmqengine's, by vLLM's name.", "queue_s"),
    Distribution("vllm:request_prefill_time_seconds", "zmqengine's, by vLLM's name.", "prefill_s"),
    Distribution("vllm:request_prompt_tokens", "zmqengine's, by vLLM's name.", "prompt_tokens"),
    Distribution("vllm:request_generation_tokens", "zmqengine's, by vLLM's name.", "output_tokens"),
)
