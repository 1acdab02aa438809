"""GET / for a browser: the state of the workers and a small chat, on one page without external resources."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import NamedTuple

import zmqengine
from zmqengine_http.endpoint import Service, get
from zmqengine_http.serving.exchange import Exchange


class Page(NamedTuple):
    """The document, and the Content-Security-Policy that allows its own script and no other."""

    body: bytes
    policy: bytes


@functools.lru_cache(maxsize=1)
def page() -> Page:
    """The page with script and style inlined; the policy names them by their hashes."""
    files = resources.files(__package__)
    html, style, script = ((files / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    body = html.replace("/* style */", style).replace("/* script */", script)
    return Page(body.encode(), policy.encode())


async def root(service: Service, exchange: Exchange) -> None:
    """GET /: the page for a browser, name and version for programs. Claude Code asks before its first
    request."""
    if "text/html" not in (exchange.header(b"accept") or ""):
        await exchange.send_json({"name": "zmqengine", "version": zmqengine.__version__, "docs": "/docs"})
        return
    body, policy = page()
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


ENDPOINTS = (get("/", root, "What the workers do and a chat, or for programs what this is", open=True),)
