"""The list of models in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping

from zmqengine_http.workers.worker import Model

_CREATED = "1970-01-01T00:00:00Z"


def model_list(models: Mapping[str, Model]) -> dict[str, object]:
    """All on one page."""
    data = [model_info(name, model) for name, model in sorted(models.items())]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def model_info(name: str, model: Model) -> dict[str, object]:
    """One model; when it was made is not known."""
    return {
        "type": "model",
        "id": name,
        "display_name": model.card.name,
        "created_at": _CREATED,
        "max_input_tokens": model.card.context_tokens,
        "max_tokens": model.card.context_tokens,
    }
