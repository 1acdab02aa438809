"""How much a model reasons, by the words of its chat template."""

from __future__ import annotations

from zmqengine_http.errors import ApiError
from zmqengine_http.worker import Model


def reasoning_variables(model: Model, effort: str | None) -> dict[str, object]:
    """The template variables for an effort. Raises a 400 if the template has none for it."""
    if effort is None:
        return {}
    template = model.tokenizer.chat_template or ""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    keyword = str(model.tokenizer.facts.get("thinking_keyword") or "enable_thinking")
    if effort == "none" and keyword in template:
        return {keyword: False}
    raise ApiError(
        400, "reasoning_effort is not supported by this model's chat template",
        param="reasoning_effort", code="unsupported_parameter",
    )  # fmt: skip
