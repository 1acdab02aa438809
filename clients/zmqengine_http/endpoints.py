"""The list of all endpoints: a new API is a folder of its own and one line here."""

from __future__ import annotations

from zmqengine_http import openapi, page
from zmqengine_http.apis import (
    adapters,
    anthropic,
    batch_files,
    chat_completions,
    completions,
    decisions,
    embeddings,
    metrics,
    model_control,
    models,
    ollama,
    probes,
    responses,
    tokenizing,
)
from zmqengine_http.apis.anthropic.errors import anthropic_error
from zmqengine_http.apis.ollama.writer import ollama_error
from zmqengine_http.endpoint import Endpoint
from zmqengine_http.serving.errors import ErrorShape, openai_error

_DESCRIBED: tuple[Endpoint, ...] = (
    *chat_completions.ENDPOINTS,
    *completions.ENDPOINTS,
    *responses.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *decisions.ENDPOINTS,
    *batch_files.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *ollama.ENDPOINTS,
    *model_control.ENDPOINTS,
    *adapters.ENDPOINTS,
    *models.ENDPOINTS,
    *tokenizing.ENDPOINTS,
    *page.ENDPOINTS,
    *probes.ENDPOINTS,
    *metrics.ENDPOINTS,
)
ENDPOINTS: tuple[Endpoint, ...] = (*_DESCRIBED, *openapi.describing(_DESCRIBED))


def error_shape_at(path: str) -> ErrorShape:
    """The shape of a refusal at a path without an endpoint: that of the API to which the path belongs."""
    if path.startswith(tuple(endpoint.path for endpoint in anthropic.ENDPOINTS)):
        return anthropic_error
    return ollama_error if path.startswith("/api/") else openai_error
