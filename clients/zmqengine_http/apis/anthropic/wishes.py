"""What a Messages request wants beyond its messages, in the words of the inner request."""

from __future__ import annotations

from zmqengine.sampling_params import SamplingOptions
from zmqengine_http.apis.anthropic.request import CountRequest, MessagesRequest, ToolChoice
from zmqengine_http.generating.generation_options import GenerationOptions
from zmqengine_http.prompt.reasoning import thinking_keyword
from zmqengine_http.workers.worker import Model

_EFFORTS = {"max": "high", "xhigh": "high"}


def tool_choice(choice: ToolChoice | None) -> str | dict[str, object]:
    """In the shape of chat completions. What cannot be forced is refused where all APIs' wishes are."""
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def response_format(request: CountRequest) -> dict[str, object]:
    """A JSON schema, from the newer or the older place."""
    given = (request.output_config and request.output_config.format) or request.output_format
    if not given:
        return {}
    if given.get("type") != "json_schema":
        return dict(given)
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": given.get("schema"), "strict": True},
    }


def effort(model: Model, request: CountRequest) -> str | None:
    """How much to reason. This API's default is not at all, as far as the model's template knows how to say so."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        template = model.tokenizer.chat_template or ""
        if thinking_keyword(model) in template:
            return "none"
        return "low" if "reasoning_effort" in template else None
    wanted = request.output_config.effort if request.output_config else None
    return _EFFORTS.get(wanted, wanted) if wanted else None


def generation_options(request: CountRequest) -> GenerationOptions:
    """How tokens are drawn and when they end; nothing where tokens are only counted."""
    if not isinstance(request, MessagesRequest):
        return GenerationOptions()
    metadata = request.metadata
    sampling = SamplingOptions(
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
    )
    if request.temperature is not None:
        sampling["temperature"] = request.temperature
    return GenerationOptions(
        sampling=sampling,
        max_tokens=request.max_tokens,
        # White space alone is what some clients send for none.
        stop=[stop for stop in request.stop_sequences if stop.strip()],
        cache_key=metadata.user_id if metadata else None,
        cache_scope=request.cache_scope,
        pin=request.pin,
    )
