"""`GenerateRequest` of the MLX service as a prompt and options of our client."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from zmqengine.protocol.messages import DEADLINE_MS_MAX
from zmqengine.sampling_params import Sampling
from zmqengine_client import Options
from zmqengine_client.errors import BadRequest
from zmqengine_smg.translation import worker_request_id, worker_seed

OPENAI_TEMPERATURE = 1.0
_PARAMETERS = [
    field
    for field in msgspec.structs.fields(Sampling)
    if field.name in pb.SamplingParams.DESCRIPTOR.fields_by_name
]


def read_request(request: pb.GenerateRequest, deadline_s: float | None) -> tuple[list[int], Options]:
    """The prompt and the options; `deadline_s` is the call's remaining time.

    A number that proto3 cannot mark as absent counts as absent when it is 0. Raises `BadRequest` with the
    field's name; the client checks ranges when the request starts.
    """
    if request.WhichOneof("input") != "tokenized":
        raise BadRequest("text: send token ids, in `tokenized`")
    prompt = list(request.tokenized.input_ids)
    if not prompt:
        raise BadRequest("tokenized.input_ids: the prompt is empty")
    sampling = request.sampling_params
    options = Options(
        request_id=worker_request_id(request.request_id),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    options.update(_parameters(sampling))
    if options["max_tokens"] == 0:
        raise BadRequest("max_tokens: must be at least 1, or left out")
    if sampling.HasField("seed"):
        options["seed"] = worker_seed(sampling.seed)
    if deadline_s is not None:
        options["deadline_ms"] = min(DEADLINE_MS_MAX, max(1, round(deadline_s * 1000)))
    return prompt, options


def _parameters(sampling: pb.SamplingParams) -> Options:
    """The sampling parameters that both sides know under one name."""
    options: dict[str, Any] = {
        field.name: getattr(sampling, field.name) or field.default for field in _PARAMETERS
    }
    options["logit_bias"] = dict(sampling.logit_bias)
    if not sampling.HasField("temperature"):
        options["temperature"] = OPENAI_TEMPERATURE
    return cast(Options, options)
