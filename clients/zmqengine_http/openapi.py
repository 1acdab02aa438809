"""The OpenAPI document, made from the request structs, and a page to read it."""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping

import msgspec

import zmqengine
from zmqengine_http import fields
from zmqengine_http.exchange import JSON, Exchange
from zmqengine_http.generate import Service
from zmqengine_http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answer a chat", ChatRequest),
    "/v1/completions": ("Continue a text", CompletionRequest),
    "/tokenize": ("The token ids of a text or a chat", TokenizeRequest),
    "/detokenize": ("The text of token ids", DetokenizeRequest),
}
_READS = {
    "/v1/models": "The models there are",
    "/v1/models/{id}": "One model",
    "/health": "Whether this process is alive",
    "/ready": "Whether a worker takes requests",
}
_STATUSES = {
    "400": "The request is at fault; `error.param` names the field",
    "401": "The API key is missing or wrong",
    "404": "No such model",
    "413": "The body is too long",
    "429": "The worker is overloaded; see Retry-After",
    "500": "This server is at fault",
    "503": "No worker is ready; see Retry-After",
    "504": "deadline_ms passed",
}


async def document(service: Service, exchange: Exchange) -> None:
    """GET /openapi.json."""
    await exchange.send(200, [JSON], _document(bool(service.config.api_keys)))


async def page(service: Service, exchange: Exchange) -> None:
    """GET /docs: the endpoints and every request field, without any script from elsewhere."""
    await exchange.send(200, [(b"content-type", b"text/html; charset=utf-8")], _page())


@functools.lru_cache(maxsize=2)
def _document(keys: bool) -> bytes:
    kinds = [kind for _, kind in _BODIES.values()]
    references, schemas = msgspec.json.schema_components(
        kinds, schema_hook=_any, ref_template="#/components/schemas/{name}"
    )
    schemas["Error"] = _ERROR
    paths: dict[str, object] = {}
    for (path, (summary, _)), reference in zip(_BODIES.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": _operation(summary, path) | {"requestBody": body}}
    for path, summary in _READS.items():
        operation = _operation(summary, path)
        if "{id}" in path:
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths[path] = {"get": operation}
    components: dict[str, object] = {"schemas": schemas}
    root: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {"title": "zmqengine", "version": zmqengine.__version__, "description": "OpenAI-compatible"},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        root["security"] = [{"key": []}]
    return msgspec.json.encode(root)


def _any(kind: type) -> dict[str, object]:
    """The schema of `object`: any JSON."""
    assert kind is object
    return {"description": "Any JSON"}


_ERROR: dict[str, object] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(summary: str, path: str) -> dict[str, object]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    success: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    if path.endswith("completions"):
        success["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, object] = {"200": {"description": "The answer", "content": success}}
    responses |= {code: {"description": text, "content": refusal} for code, text in _STATUSES.items()}
    return {"summary": summary, "operationId": path.strip("/").replace("/", "_"), "responses": responses}


@functools.lru_cache(maxsize=1)
def _page() -> bytes:
    paths = [("POST", path, summary) for path, (summary, _) in _BODIES.items()]
    paths += [("GET", path, summary) for path, summary in _READS.items()]
    listed = "".join(
        f"<tr><td>{m}</td><td><code>{p}</code></td><td>{html.escape(s)}</td></tr>" for m, p, s in paths
    )
    table = "".join(
        f"<tr><td><code>{f.name}</code></td><td>{', '.join(f.endpoints)}</td><td>{f.fate}</td>"
        f"<td>{html.escape(f.note)}</td></tr>"
        for f in fields.FIELDS
    )
    return (
        "<!doctype html><meta charset=utf-8><title>zmqengine</title>"
        "<style>body{font:15px sans-serif;margin:2em;max-width:60em}td{padding:.2em .8em;vertical-align:top}</style>"
        '<h1>zmqengine</h1><p>OpenAI-compatible. Machine-readable: <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Endpoints</h2><table>{listed}</table><h2>Request fields</h2><table>{table}</table>"
    ).encode()
