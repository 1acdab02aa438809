"""The OpenAPI document, generated from the list of endpoints, and an HTML page of it."""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence

import msgspec

import zmqengine
from zmqengine_http.endpoint import Endpoint, Service, get
from zmqengine_http.serving.exchange import JSON, Exchange

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


def describing(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, Endpoint]:
    """GET /openapi.json and GET /docs, which describe the given endpoints.

    The page lists every endpoint and every request field, and loads no external script.
    """
    document_of = functools.lru_cache(maxsize=2)(lambda keys: _document(endpoints, keys))
    page_once = functools.lru_cache(maxsize=1)(lambda: _page(endpoints))

    async def document(service: Service, exchange: Exchange) -> None:
        await exchange.send(200, [JSON], document_of(bool(service.config.keys)))

    async def page(service: Service, exchange: Exchange) -> None:
        await exchange.send(200, [(b"content-type", b"text/html; charset=utf-8")], page_once())

    return (
        get("/openapi.json", document, "This description, for machines", open=True),
        get("/docs", page, "This description, for people", open=True),
    )


def _document(endpoints: Sequence[Endpoint], keys: bool) -> bytes:
    bodies = [endpoint.body.kind for endpoint in endpoints if endpoint.body]
    references, schemas = msgspec.json.schema_components(
        bodies, schema_hook=any_json, ref_template="#/components/schemas/{name}"
    )
    schemas["Error"] = _ERROR
    reference_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint)
        if endpoint.body:
            schema = reference_of[endpoint.body.kind]
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(_path(endpoint), {})[endpoint.method.lower()] = operation
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


def _path(endpoint: Endpoint) -> str:
    """The path in OpenAPI's notation, without the router's converters."""
    return endpoint.path.replace(":path}", "}")


def any_json(kind: type) -> dict[str, object]:
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


def _operation(endpoint: Endpoint) -> dict[str, object]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    success: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.streams:
        success["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, object] = {"200": {"description": "The answer", "content": success}}
    responses |= {code: {"description": text, "content": refusal} for code, text in _STATUSES.items()}
    path = _path(endpoint)
    operation: dict[str, object] = {
        "summary": endpoint.summary, "responses": responses,
        "operationId": ("delete_" if endpoint.method == "DELETE" else "") + path.strip("/").replace("/", "_"),
    }  # fmt: skip
    if "{id}" in path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _page(endpoints: Sequence[Endpoint]) -> bytes:
    listed = "".join(
        f"<tr><td>{endpoint.method}</td><td><code>{_path(endpoint)}</code></td>"
        f"<td>{html.escape(endpoint.summary)}</td></tr>"
        for endpoint in endpoints
    )
    fields = "".join(
        f"<h2><code>{endpoint.path}</code></h2><table>"
        + "".join(
            f"<tr><td><code>{name}</code></td><td>supported</td><td></td></tr>"
            for name in endpoint.body.supported
        )
        + "".join(
            f"<tr><td><code>{field.name}</code></td><td>{field.fate}</td><td>{html.escape(field.note)}</td></tr>"
            for field in endpoint.body.fields.values()
        )
        + "</table>"
        for endpoint in endpoints
        if endpoint.body
    )
    return (
        "<!doctype html><meta charset=utf-8><title>zmqengine</title>"
        "<style>body{font:15px sans-serif;margin:2em;max-width:60em}td{padding:.2em .8em;vertical-align:top}</style>"
        '<h1>zmqengine</h1><p>OpenAI-compatible. Machine-readable: <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Endpoints</h2><table>{listed}</table>{fields}"
    ).encode()
