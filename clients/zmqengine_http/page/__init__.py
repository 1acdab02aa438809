"""GET / and GET /workers for a browser: a chat, and the state of the workers, without external resources.

The libraries and icons in `vendor/` are there with their licences. A page has in itself what every visit needs;
`LIBRARIES`, which few answers need, it fetches.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Any, NamedTuple

import msgspec

import zmqengine
from zmqengine.sampling_params import Sampling
from zmqengine_http.apis.chat_completions.request import ChatRequest
from zmqengine_http.endpoint import Service, get
from zmqengine_http.openapi import any_json
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange

SCRIPTS = {
    "chat": (
        "server.js",
        "vendor/markdown-it.min.js",
        "chat/libraries.js",
        "chat/markdown.js",
        "chat/store.js",
        "chat/sidebar.js",
        "chat/probabilities.js",
        "chat/options.js",
        "chat/models.js",
        "chat/welcome.js",
        "chat/turns.js",
        "chat/answers.js",
        "chat/composer.js",
        "chat/chat.js",
    ),
    "workers": ("server.js", "workers/workers.js"),
}
"""The scripts of each page, in order."""
ICONS = "vendor/lucide-1.62.0.svg"
LIBRARIES = ("highlight-11.12.0.min.js", "temml-0.13.5.min.js")
"""Scripts that the chat fetches when an answer has code or formulas; their names change with their versions."""


class Page(NamedTuple):
    """The document, and the Content-Security-Policy that allows its own scripts and no other."""

    body: bytes
    policy: bytes


@functools.lru_cache(maxsize=len(SCRIPTS))
def page(name: str) -> Page:
    """A page with scripts and style inlined; the policy names them, and the libraries, by their hashes."""
    style = _text("style.css") + _text(f"{name}/{name}.css")
    scripts = [_text(file) for file in SCRIPTS[name]]
    libraries = [_text(f"vendor/{file}") for file in LIBRARIES] if name == "chat" else []
    makers = "zmqengine" if libraries else "'none'"
    hashes = " ".join(f"'{_hash(script)}'" for script in (*scripts, *libraries))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src '{_hash(style)}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        f"trusted-types {makers}"
    )
    parts = {
        "/* style */": style,
        "<!-- icons -->": _text(ICONS),
        "/* sampling */": msgspec.json.encode(sampling_fields()).decode(),
        "<!-- scripts -->\n": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    body = _text(f"{name}/{name}.html")
    for mark, part in parts.items():
        body = body.replace(mark, part)
    return Page(body.encode(), policy.encode())


def sampling_fields() -> dict[str, dict[str, Any]]:
    """The JSON schema of each sampling parameter: its meaning and default, in the bounds of chat completions."""
    fields = {}
    asked = _properties(ChatRequest)
    for name, field in _properties(Sampling).items():
        bounds = asked[name].get("anyOf", [asked[name]])[0]
        fields[name] = field | {key: value for key, value in bounds.items() if key != "default"}
    return fields


def _properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    _, schemas = msgspec.json.schema_components([kind], schema_hook=any_json)
    properties: dict[str, dict[str, Any]] = schemas[kind.__name__]["properties"]
    return properties


async def root(service: Service, exchange: Exchange) -> None:
    """GET /: the chat for a browser, name and version for programs. Claude Code asks before its first request."""
    if "text/html" not in (exchange.header(b"accept") or ""):
        await exchange.send_json({"name": "zmqengine", "version": zmqengine.__version__, "docs": "/docs"})
        return
    await _send(exchange, "chat")


async def workers(service: Service, exchange: Exchange) -> None:
    """GET /workers: the state of the workers."""
    await _send(exchange, "workers")


async def _send(exchange: Exchange, name: str) -> None:
    body, policy = page(name)
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
    await exchange.send(200, headers, body)


async def library(service: Service, exchange: Exchange) -> None:
    """GET /page/{id}: one of `LIBRARIES`; the page that runs it checks its hash."""
    name = exchange.scope["path_params"]["id"]
    if name not in LIBRARIES:
        raise ApiError(404, f"there is no library {name[:100]!r}", code="unknown_url")
    headers = [
        (b"content-type", b"text/javascript; charset=utf-8"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"max-age=31536000, immutable"),
    ]
    await exchange.send(200, headers, _text(f"vendor/{name}").encode())


def _text(file: str) -> str:
    return (resources.files(__package__) / file).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


ENDPOINTS = (
    get("/", root, "A chat for a browser, or for programs what this is", open=True),
    get("/workers", workers, "What the workers do, for a browser", open=True),
    get("/page/{id}", library, "A library of the chat", open=True),
)
