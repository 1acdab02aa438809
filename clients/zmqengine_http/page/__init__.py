"""GET / and GET /workers for a browser: a chat, and the state of the workers, without external resources.

markdown-it, which parses the answers, is in `vendor/` with its licence.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import NamedTuple

import zmqengine
from zmqengine_http.endpoint import Service, get
from zmqengine_http.serving.exchange import Exchange

SCRIPTS = {
    "chat": (
        "server.js",
        "vendor/markdown-it.min.js",
        "markdown.js",
        "store.js",
        "probabilities.js",
        "chat.js",
    ),
    "workers": ("server.js", "workers.js"),
}
"""The scripts of each page, in order."""


class Page(NamedTuple):
    """The document, and the Content-Security-Policy that allows its own scripts and no other."""

    body: bytes
    policy: bytes


@functools.lru_cache(maxsize=len(SCRIPTS))
def page(name: str) -> Page:
    """A page with scripts and style inlined; the policy names them by their hashes."""
    html, style, *scripts = (
        (resources.files(__package__) / file).read_text("utf-8")
        for file in (f"{name}.html", "style.css", *SCRIPTS[name])
    )
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src '{_hash(style)}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    inlined = "".join(f"<script>{script}</script>\n" for script in scripts)
    body = html.replace("/* style */", style).replace("<!-- scripts -->\n", inlined)
    return Page(body.encode(), policy.encode())


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


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


ENDPOINTS = (
    get("/", root, "A chat for a browser, or for programs what this is", open=True),
    get("/workers", workers, "What the workers do, for a browser", open=True),
)
