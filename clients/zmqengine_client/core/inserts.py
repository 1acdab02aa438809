"""A request as an insert command, and what the worker would refuse, found before anything is sent."""

from __future__ import annotations

from zmqengine.errors import BadRequest, RequestError, TooLarge, ZmqEngineError
from zmqengine.protocol.messages import Insert, Limits, ModelCard
from zmqengine.request_rules import NO_CONSTRAINT, check_context, check_token_ids
from zmqengine_client.core.request import Request


def refusal(request: Request, limits: Limits, model: ModelCard | None) -> ZmqEngineError | None:
    """Why this worker cannot take the request, or None. Settles how long the output may become."""
    options = request.options
    room = limits.context_tokens_max - len(request.prompt)
    request.max_tokens = options.max_tokens or max(1, room)
    request.open_ended = options.max_tokens is None and limits.open_max_tokens
    try:
        check_context(request.prompt, options.max_tokens, limits.context_tokens_max)
        if options.constraint is not None and not limits.constraints:
            return BadRequest(NO_CONSTRAINT)
        if (options.cache_scope is not None or options.pin) and not limits.cache_scope:
            return BadRequest("this worker is older than cache_scope and pin")
        if not options.speculate and not limits.speculation:
            return BadRequest("this worker does not support the option speculate")
        if model is not None:
            check_token_ids(
                model.vocab_size,
                options.sampling,
                prompt=request.prompt,
                stop_token_ids=options.stop_token_ids,
            )
    except RequestError as error:
        return error
    return None


def size_refusal(body: bytes, limits: Limits) -> ZmqEngineError | None:
    """The error for a body that is longer than the worker takes, or None."""
    if len(body) <= limits.frame_bytes_max:
        return None
    return TooLarge(
        f"the request has {len(body)} bytes, the worker takes {limits.frame_bytes_max}: shorten it"
    )


def insert_message(call: int, epoch: bytes, request: Request, now: float) -> Insert:
    """The command, with the output so far as `emitted` and the time that is left as `deadline_ms`."""
    options = request.options
    deadline_ms = options.deadline_ms
    if deadline_ms is not None:
        deadline_ms = max(1, round((request.deadline_at - now) * 1000))
    return Insert(
        call=call,
        request=request.id,
        epoch=epoch,
        prompt=request.prompt,
        max_tokens=None if request.open_ended else request.max_tokens,
        emitted=list(request.tokens),
        sampling=options.sampling,
        seed=request.seed,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        priority=options.priority,
        deadline_ms=deadline_ms,
        cache_scope=options.cache_scope,
        pin=options.pin,
        constraint=options.constraint,
        speculate=options.speculate,
    )
