"""`Add` of the ZeroMQ wire as a prompt and options of our client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from zmqengine.sampling_params import Sampling
from zmqengine_client import Options
from zmqengine_client.errors import BadRequest
from zmqengine_smg.engine_constraints import constraint_options
from zmqengine_smg.engine_messages import Add
from zmqengine_smg.refusals import refused, worker_request_id, worker_seed


def _same(name: str) -> Callable[[Any], Options]:
    return lambda value: cast(Options, {name: value})


# Sampling parameters that are ours, by the same name or by another form. Left out, they have the wire's defaults below.
_TRANSLATED: dict[str, Callable[[Any], Options]] = {
    **{name: _same(name) for name in Sampling.__struct_fields__},
    # -1 is another way to say "all".
    "top_k": lambda value: Options(top_k=max(0, value)),
    "seed": lambda value: Options(seed=worker_seed(value)),
    "logprobs": lambda value: Options(logprobs=value),
    "structured_outputs": constraint_options,
}
# Read together below, or without an effect on tokens: stop strings, choices and text are the gateway's own work.
_READ_ELSEWHERE = {"max_tokens", "n", "stop_token_ids", "_eos_token_id"}
_NO_EFFECT = {
    "_all_stop_token_ids", "detokenize", "include_stop_str_in_output", "output_kind", "skip_clone",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stream_interval",
}  # fmt: skip
_WIRE_DEFAULTS = Options(temperature=1.0, top_p=1.0)
_WIRE_MAX_TOKENS = 16

_REFUSED_IN_ADD = (
    "mm_features", "pooling_params", "lora_request", "cache_salt", "prompt_embeds", "prompt_is_token_ids", "resumable",
)  # fmt: skip


def read_add(add: Add, context_tokens: int) -> tuple[list[int], Options]:
    """The prompt and the options. Raises `BadRequest` with the name of what cannot be honoured.

    The gateway has no way to leave `max_tokens` out: it sends all that the context leaves. That is what None says to
    the worker, which then need not set memory aside for the longest answer.
    """
    for name in _REFUSED_IN_ADD:
        if getattr(add, name):
            raise refused(name)
    prompt, sampling = add.prompt_token_ids, add.sampling_params
    if not prompt:
        raise BadRequest("prompt_token_ids: the prompt is empty")
    if sampling is None:
        raise BadRequest("sampling_params: missing")
    max_tokens = sampling.get("max_tokens", _WIRE_MAX_TOKENS)
    end_token = sampling.get("_eos_token_id")
    options = Options(
        **_WIRE_DEFAULTS,
        request_id=worker_request_id(add.request_id),
        priority=add.priority,
        max_tokens=None if max_tokens == context_tokens - len(prompt) else max_tokens,
        # The gateway names an end token unless the end is to be ignored. The worker knows all of the model's.
        ignore_eos=end_token is None,
        stop_token_ids=sampling.get("stop_token_ids") or [],
    )
    if sampling.get("n", 1) != 1:
        raise BadRequest("n: the gateway sends each choice as a request of its own")
    options.update(_translate(sampling))
    return prompt, options


def end_tokens(add: Add) -> frozenset[int]:
    """The tokens whose finding the gateway wants to hear of: those asked for, without the model's own end."""
    sampling = add.sampling_params or {}
    return frozenset(sampling.get("stop_token_ids") or ()) - {sampling.get("_eos_token_id")}


def _translate(sampling: Mapping[str, Any]) -> Options:
    options = Options()
    for name, value in sampling.items():
        if name in _READ_ELSEWHERE or name in _NO_EFFECT or value is None:
            continue
        translate = _TRANSLATED.get(name)
        if translate is not None:
            try:
                options.update(translate(value))
            except (TypeError, AttributeError):
                raise BadRequest(f"{name}: a {type(value).__name__} is not a valid value") from None
        elif value:
            # What is off (0, false, empty) asks for nothing.
            raise refused(name)
    return options
