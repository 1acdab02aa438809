"""How much a model reasons, by the words of its chat template."""

from __future__ import annotations

from zmqengine_http.workers.worker import Model

_SWITCHES = ("enable_thinking", "thinking")


def reasoning_variables(model: Model, effort: str | None) -> dict[str, object] | None:
    """The template variables for an effort, or None if the template has no word for it.

    A template that can only be told whether to reason is told so: `none` is off, anything else on.
    """
    if effort is None:
        return {}
    known = model.tokenizer.template_variables
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    keyword = thinking_keyword(model)
    return {keyword: effort != "none"} if keyword in known else None


def thinking_keyword(model: Model) -> str:
    """The variable that turns reasoning on and off, in templates that have one."""
    given = model.tokenizer.facts.get("thinking_keyword")
    known = model.tokenizer.template_variables
    return next((word for word in (str(given), *_SWITCHES) if word in known), _SWITCHES[0])
