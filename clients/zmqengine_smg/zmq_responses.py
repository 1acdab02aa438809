"""Chunks, completions and errors of our client as outputs of the ZeroMQ wire."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

import msgspec

from zmqengine_client import TokenChunk, TokenLogprob
from zmqengine_client.aio.streams import AsyncStream
from zmqengine_client.errors import ZmqEngineError
from zmqengine_smg.translation import matched_stop_token
from zmqengine_smg.zmq_messages import (
    ABORTED,
    ERROR,
    LENGTH,
    RAW_VIEW,
    STOP,
    Array,
    Logprobs,
    Output,
    PrefillStats,
    SchedulerStats,
)

_FINISH = {"stop": STOP, "length": LENGTH, "abort": ABORTED}


def output(
    request_id: str,
    stream: AsyncStream[TokenChunk],
    chunk: TokenChunk | None,
    stop_token_ids: Collection[int],
    prompt_tokens: int,
) -> Output:
    """The new tokens of one request, and its finish if it has ended."""
    finish: int | None = None
    reason: int | str | None = None
    cached = stream.progress.cached if stream.progress is not None else 0
    if stream.ended:
        try:
            completion = stream.result
        except ZmqEngineError as error:
            finish, reason = ERROR, error.message
        else:
            finish, reason = _FINISH[completion.finish], matched_stop_token(completion, stop_token_ids)
            cached = completion.cached_tokens
    tokens = chunk.tokens if chunk is not None else []
    first = chunk is not None and chunk.first_index == 0
    return Output(
        request_id=request_id,
        new_token_ids=tokens,
        new_logprobs=_logprobs(tokens, chunk.logprobs) if chunk is not None and chunk.logprobs else None,
        finish_reason=finish,
        stop_reason=reason,
        prefill_stats=_prefill_stats(prompt_tokens, cached) if first or finish is not None else None,
    )


def refusal(request_id: str, message: str) -> Output:
    """The output that ends a refused request."""
    return Output(request_id=request_id, new_token_ids=[], finish_reason=ERROR, stop_reason=message)


def scheduler_stats(numbers: Mapping[str, int | float]) -> SchedulerStats:
    """The load of a worker, from the numbers of its status."""
    room = numbers.get("kv_bytes_max", 0)
    return SchedulerStats(
        num_running_reqs=int(numbers.get("running", 0)),
        num_waiting_reqs=int(numbers.get("queued", 0)),
        kv_cache_usage=min(1.0, numbers.get("kv_bytes", 0) / room) if room > 0 else 0.0,
    )


def _prefill_stats(prompt_tokens: int, cached: int) -> PrefillStats:
    return PrefillStats(
        num_prompt_tokens=prompt_tokens,
        num_computed_tokens=prompt_tokens - cached,
        num_cached_tokens=cached,
        num_local_cached_tokens=cached,
    )


def _logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Logprobs:
    """Rows padded to equal length. A token outside the top logprobs gets the rank after the last of them."""
    columns = 1 + max(len(entry.top) for entry in logprobs)
    ids: list[int] = []
    values: list[float] = []
    ranks: list[int] = []
    for token, entry in zip(tokens, logprobs, strict=True):
        row = [(token, entry.logprob), *entry.top]
        row += row[-1:] * (columns - len(row))
        ids += [id_ for id_, _ in row]
        values += [value for _, value in row]
        ranks.append(
            1 + next((place for place, (id_, _) in enumerate(entry.top) if id_ == token), columns - 1)
        )
    shape = [len(ranks), columns]
    return Logprobs(
        token_ids=_array("<i8", shape, "q", ids),
        logprobs=_array("<f4", shape, "f", values),
        ranks=_array("<i8", shape[:1], "q", ranks),
    )


def _array(dtype: str, shape: list[int], code: str, values: Sequence[int | float]) -> Array:
    return Array(dtype, shape, msgspec.msgpack.Ext(RAW_VIEW, struct.pack(f"<{len(values)}{code}", *values)))
