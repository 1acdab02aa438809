"""`Add` of the ZeroMQ wire as a prompt and options of our client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from zmqengine.protocol.messages import Constraint
from zmqengine.sampling_params import Sampling
from zmqengine_client import Options
from zmqengine_client.errors import BadRequest
from zmqengine_smg.translation import refused, worker_request_id, worker_seed
from zmqengine_smg.zmq_messages import Add

_REFUSED_IN_ADD = (
    "mm_features", "pooling_params", "lora_request", "cache_salt", "prompt_embeds", "prompt_is_token_ids", "resumable",
)  # fmt: skip
_WIRE_DEFAULTS = Options(temperature=1.0, top_p=1.0)
_WIRE_MAX_TOKENS = 16


def read_add(add: Add, context_tokens: int) -> tuple[list[int], Options]:
    """The prompt and the options. Raises `BadRequest` with the name of a field that cannot be honoured.

    The gateway cannot omit `max_tokens`: it sends all that the context leaves. That value becomes None, so
    that the worker need not reserve memory for the longest output.
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
        # The gateway names one end token, or none for ignore_eos. The worker knows all end tokens of the
        # model.
        ignore_eos=end_token is None,
        stop_token_ids=sampling.get("stop_token_ids") or [],
    )
    if sampling.get("n", 1) != 1:
        raise BadRequest("n: the gateway sends each choice as a request of its own")
    options.update(_translate(sampling))
    return prompt, options


def end_tokens(add: Add) -> frozenset[int]:
    """The stop tokens that the gateway reports when they end an output: the requested ones, without the
    model's own."""
    sampling = add.sampling_params or {}
    return frozenset(sampling.get("stop_token_ids") or ()) - {sampling.get("_eos_token_id")}


def constraint_options(wanted: Mapping[str, Any]) -> Options:
    """The options of one `structured_outputs` constraint, such as {"json": SCHEMA}.

    Values that are off ask for nothing; names with a leading underscore are the gateway's internal notes.
    Raises `BadRequest` with the name of an unknown kind or option. Whether the worker supports constraints is
    its own check.
    """
    asked = {name: value for name, value in wanted.items() if value and not name.startswith("_")}
    unknown = [name for name in asked if name not in _CONSTRAINTS]
    if unknown:
        raise refused(f"structured_outputs.{unknown[0]}")
    if len(asked) != 1:
        raise BadRequest(f"structured_outputs: give one constraint, not {len(asked)}")
    ((name, value),) = asked.items()
    return Options(constraint=_CONSTRAINTS[name](value))


def _schema(value: Any) -> Constraint:
    return Constraint("json_schema", value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _grammar(value: Any) -> Constraint:
    if "::=" in value:
        raise BadRequest("structured_outputs.grammar: EBNF is not known here; give a Lark grammar")
    return Constraint("lark", value)


_CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "json": _schema,
    "json_object": lambda value: Constraint("json"),
    "regex": lambda value: Constraint("regex", value),
    "choice": lambda value: Constraint("choice", choices=list(value)),
    "grammar": _grammar,
}


def _same(name: str) -> Callable[[Any], Options]:
    return lambda value: cast(Options, {name: value})


# Parameters that the worker has under the same name or in another form. Omitted ones take `_WIRE_DEFAULTS`.
_TRANSLATED: dict[str, Callable[[Any], Options]] = {
    **{name: _same(name) for name in Sampling.__struct_fields__},
    # On this wire -1 also means all tokens.
    "top_k": lambda value: Options(top_k=max(0, value)),
    "seed": lambda value: Options(seed=worker_seed(value)),
    "logprobs": lambda value: Options(logprobs=value),
    "structured_outputs": constraint_options,
}
_READ_IN_ADD = {"max_tokens", "n", "stop_token_ids", "_eos_token_id"}
# Stop strings, choices and text are the gateway's own work.
_NO_EFFECT = {
    "_all_stop_token_ids", "detokenize", "include_stop_str_in_output", "output_kind", "skip_clone",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stream_interval",
}  # fmt: skip


def _translate(sampling: Mapping[str, Any]) -> Options:
    options = Options()
    for name, value in sampling.items():
        if name in _READ_IN_ADD or name in _NO_EFFECT or value is None:
            continue
        translate = _TRANSLATED.get(name)
        if translate is not None:
            try:
                options.update(translate(value))
            except (TypeError, AttributeError):
                raise BadRequest(f"{name}: a {type(value).__name__} is not a valid value") from None
        elif value:
            # A value that is off (0, false, empty) asks for nothing.
            raise refused(name)
    return options
