"""The list of all endpoints: a new API is a folder of its own and one line here."""

from __future__ import annotations

from zmqengine_http import openapi, page
from zmqengine_http.apis import (
    anthropic,
    chat_completions,
    completions,
    metrics,
    models,
    probes,
    responses,
    tokenizing,
)
from zmqengine_http.endpoint import Endpoint

_DESCRIBED: tuple[Endpoint, ...] = (
    *chat_completions.ENDPOINTS,
    *completions.ENDPOINTS,
    *responses.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *models.ENDPOINTS,
    *tokenizing.ENDPOINTS,
    *page.ENDPOINTS,
    *probes.ENDPOINTS,
    *metrics.ENDPOINTS,
)
ENDPOINTS: tuple[Endpoint, ...] = (*_DESCRIBED, *openapi.describing(_DESCRIBED))
