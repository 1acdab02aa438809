"""Sampling parameters: one record, from a client's options to the engine.

A parameter is declared here with its type, bounds, default and help. The wire, the client library, the HTTP front-end
and the command line are derived from it; only the engine's sampling and SPEC.md are written separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta, Struct

from zmqengine.errors import BadRequest

TOKEN_ID_MAX = 2**31 - 1
LOGIT_BIAS_MAX = 1024

TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class Sampling(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters, applied in this order: logit_bias, penalties, min_tokens, temperature, top_k,
    top_p, min_p.

    The default of each turns it off.
    """

    temperature: Annotated[
        float,
        Meta(ge=0.0, le=100.0, description="0: always the most probable token; higher: more variety."),
    ] = 0.0
    top_p: Annotated[
        float, Meta(gt=0.0, le=1.0, description="Keep the smallest set of tokens with this probability.")
    ] = 1.0
    top_k: Annotated[
        int, Meta(ge=0, le=TOKEN_ID_MAX, description="Keep this many of the most probable tokens.")
    ] = 0
    min_p: Annotated[
        float,
        Meta(ge=0.0, le=1.0, description="Keep tokens of at least this share of the highest probability."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100.0, description="Over 1: against repeating the prompt and itself.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2.0, le=2.0, description="Against tokens that were used.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2.0, le=2.0, description="Against tokens, by how often they were used.")
    ] = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=LOGIT_BIAS_MAX)] = {}
    min_tokens: Annotated[
        int, Meta(ge=0, le=TOKEN_ID_MAX, description="No end or stop token before the output has this many.")
    ] = 0


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters as keyword options."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int


def check_sampling(sampling: Sampling) -> None:
    """Raise `BadRequest`, naming the field, for a value of the wrong type or out of range."""
    try:
        msgspec.convert(msgspec.structs.asdict(sampling), Sampling)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
