"""Chunks and completions of our client as messages of the MLX service."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from zmqengine_client import Completion, TokenChunk, TokenLogprob


def chunk_message(chunk: TokenChunk, prompt_tokens: int, cached_tokens: int) -> pb.GenerateResponse:
    """New tokens of a streamed answer; the counts are those up to and with them."""
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
    """The end of a streamed answer: no tokens, they went before."""
    return pb.GenerateResponse(complete=_complete(completion, stop_token_ids))


def whole_message(
    completion: Completion, logprobs: Sequence[TokenLogprob] | None, stop_token_ids: Sequence[int]
) -> pb.GenerateResponse:
    """A whole answer at once."""
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
    if completion.finish == "stop" and completion.tokens and completion.tokens[-1] in stop_token_ids:
        complete.matched_stop_token_id = completion.tokens[-1]
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
