"""The table of request fields in docs/http-clients.md, by the bodies of the endpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

from zmqengine_http.apis.anthropic.request import MESSAGES_BODY
from zmqengine_http.apis.chat_completions.request import CHAT_BODY
from zmqengine_http.apis.completions.request import COMPLETION_BODY
from zmqengine_http.apis.embeddings.request import EMBEDDING_BODY
from zmqengine_http.apis.ollama.embed import EMBED_BODY
from zmqengine_http.apis.ollama.request import CHAT_BODY as OLLAMA_CHAT_BODY
from zmqengine_http.apis.ollama.request import GENERATE_BODY
from zmqengine_http.apis.responses.request import RESPONSES_BODY
from zmqengine_http.serving.body import Body

PAGE = "docs/http-clients.md"
HONOURED, REFUSED, IGNORED, NAMED = "honoured", "refused", "ignored", "named"
_ALLOWED = "refused*"
"""Treatment of a field that `--unknown-fields ignore` lets pass."""


class Column(NamedTuple):
    """An endpoint, or an object within its body; `lenient`: what is not known there is ignored, and named."""

    title: str
    body: Body[Any]
    lenient: bool = False


COLUMNS = (
    Column("/v1/chat/completions", CHAT_BODY),
    Column("/v1/completions", COMPLETION_BODY),
    Column("/v1/responses", RESPONSES_BODY),
    Column("/v1/messages", MESSAGES_BODY, lenient=True),
    Column("/api/chat", OLLAMA_CHAT_BODY, lenient=True),
    Column("/api/generate", GENERATE_BODY, lenient=True),
    Column("Ollama's options", CHAT_BODY, lenient=True),
    Column("/v1/embeddings", EMBEDDING_BODY),
    Column("/api/embed", EMBED_BODY, lenient=True),
)


def treatment(column: Column, name: str) -> str:
    """The treatment of a field: one of the four, or the field that it is a synonym of."""
    body = column.body
    if name in body.synonyms:
        return body.synonyms[name]
    if name in body.supported:
        return HONOURED
    field = body.fields.get(name)
    if field is None:
        return NAMED if column.lenient else REFUSED
    if field.fate == "foreign":
        return NAMED if column.lenient else _ALLOWED
    return {"refused": REFUSED, "ignored": IGNORED, "reported": NAMED}[field.fate]


def names() -> list[str]:
    """Every field that some endpoint knows, in the order of the alphabet."""
    return sorted(
        {
            name
            for column in COLUMNS
            for name in (*column.body.supported, *column.body.fields, *column.body.synonyms)
        }
    )


def markdown_table() -> str:
    """A row for each field; the endpoints that know it, by what they do with it."""
    lines = ["| field | treatment | reason |", "|---|---|---|"]
    for name in names():
        known: dict[str, list[str]] = {}
        notes: dict[str, None] = {}
        for column in COLUMNS:
            body = column.body
            if name in body.supported or name in body.fields or name in body.synonyms:
                shown = treatment(column, name)
                shown = f"is `{shown}`" if name in body.synonyms else shown
                known.setdefault(shown, []).append(column.title)
                if name in body.fields and body.fields[name].note:
                    notes[body.fields[name].note] = None
        told = [f"{how}: {', '.join(titles)}" for how, titles in known.items()]
        lines.append(f"| `{name}` | {'; '.join(told)} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


def parts() -> dict[str, str]:
    """The generated part of the page."""
    return {"request fields": markdown_table()}
