"""How much a model reasons, by the words of its chat template."""

from __future__ import annotations

from zmqengine_http.worker import Model


def reasoning_variables(model: Model, effort: str | None) -> dict[str, object] | None:
    """The template variables for an effort, or None if the template has no word for it.

    A template that can only be told whether to reason is told so: `none` is off, anything else on.
    """
    if effort is None:
        return {}
    template = model.tokenizer.chat_template or ""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    keyword = thinking_keyword(model)
    return {keyword: effort != "none"} if keyword in template else None


def thinking_keyword(model: Model) -> str:
    """The variable that turns reasoning on and off, in templates that have one."""
    return str(model.tokenizer.facts.get("thinking_keyword") or "enable_thinking")
