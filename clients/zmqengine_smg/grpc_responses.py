"""Chunks, completions and errors of our client as messages and statuses of the MLX gRPC service."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from zmqengine_client import Completion, TokenChunk, TokenLogprob, errors
from zmqengine_smg.translation import matched_stop_token

Code = grpc.StatusCode


def chunk_message(chunk: TokenChunk, prompt_tokens: int, cached_tokens: int) -> pb.GenerateResponse:
    """New tokens of a streamed response; the counts include them."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=chunk.tokens,
            prompt_tokens=prompt_tokens,
            completion_tokens=chunk.first_index + len(chunk.tokens),
            cached_tokens=cached_tokens,
            output_logprobs=_logprobs(chunk.tokens, chunk.logprobs),
        )
    )


def last_message(completion: Completion, stop_token_ids: Sequence[int]) -> pb.GenerateResponse:
    """The end of a streamed response, without tokens: the chunks carried them."""
    return pb.GenerateResponse(complete=_complete(completion, stop_token_ids))


def whole_message(
    completion: Completion, logprobs: Sequence[TokenLogprob] | None, stop_token_ids: Sequence[int]
) -> pb.GenerateResponse:
    complete = _complete(completion, stop_token_ids)
    complete.output_ids.extend(completion.tokens)
    shaped = _logprobs(completion.tokens, logprobs)
    if shaped is not None:
        complete.output_logprobs.CopyFrom(shaped)
    return pb.GenerateResponse(complete=complete)


def _complete(completion: Completion, stop_token_ids: Sequence[int]) -> pb.GenerateComplete:
    complete = pb.GenerateComplete(
        finish_reason=completion.finish,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=len(completion.tokens),
        cached_tokens=completion.cached_tokens,
    )
    matched = matched_stop_token(completion, stop_token_ids)
    if matched is not None:
        complete.matched_stop_token_id = matched
    return complete


def _logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> pb.OutputLogProbs | None:
    if logprobs is None:
        return None
    return pb.OutputLogProbs(
        token_ids=tokens,
        token_logprobs=[entry.logprob for entry in logprobs],
        top_logprobs=[
            pb.TopLogProbs(
                token_ids=[token for token, _ in entry.top], values=[value for _, value in entry.top]
            )
            for entry in logprobs
        ],
    )


# --- errors ------------------------------------------------------------------------------------------------

# The first class that matches decides.
_CODES: tuple[tuple[type[errors.ZmqEngineError], grpc.StatusCode], ...] = (
    (errors.Conflict, Code.ALREADY_EXISTS),
    (errors.UnknownRequest, Code.INTERNAL),
    (errors.NeverFits, Code.FAILED_PRECONDITION),
    (errors.ConstraintFailed, Code.FAILED_PRECONDITION),
    (errors.RequestError, Code.INVALID_ARGUMENT),
    (errors.NotAuthorized, Code.PERMISSION_DENIED),
    (errors.Overloaded, Code.RESOURCE_EXHAUSTED),
    (errors.Unavailable, Code.UNAVAILABLE),
    (errors.SessionError, Code.UNAVAILABLE),
    (errors.AnswerTimeout, Code.UNAVAILABLE),
    (errors.LeaseExpired, Code.UNAVAILABLE),
    (errors.ShutDown, Code.UNAVAILABLE),
    (errors.DeadlineExceeded, Code.DEADLINE_EXCEEDED),
    (errors.Aborted, Code.CANCELLED),
    (errors.ZmqEngineError, Code.INTERNAL),
)


def status_of(error: errors.ZmqEngineError) -> grpc.StatusCode:
    """The gRPC status of an error; it tells the gateway to fail, to reroute or to retry the request."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def trailers_of(error: errors.ZmqEngineError) -> tuple[tuple[str, str], ...]:
    """The retry delay of an error, in the trailer that gRPC's retry policies read."""
    if error.retry_after_ms is None:
        return ()
    return (("grpc-retry-pushback-ms", str(error.retry_after_ms)),)
