"""GET /v1/models in three shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.front import Front, call, get, serving
from tests.http.scripted import CONTEXT_TOKENS, ScriptedClient
from zmqengine_http import HttpConfig

# What codex-rs' ModelInfo cannot do without.
CODEX_FIELDS = {
    "slug", "display_name", "description", "supported_reasoning_levels", "shell_type", "visibility",
    "supported_in_api", "priority", "upgrade", "base_instructions", "supports_reasoning_summaries",
    "support_verbosity", "default_verbosity", "apply_patch_tool_type", "truncation_policy",
    "supports_parallel_tool_calls", "context_window", "experimental_supported_tools",
}  # fmt: skip


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    config = HttpConfig(aliases={"claude-sonnet": "scripted"})
    with serving(config, lambda *_: ScriptedClient(lambda prompt: "x")) as front:  # type: ignore[arg-type, return-value]
        yield front


def test_openai_gets_openais_list(front: Front) -> None:
    """With nothing said."""
    assert {card["id"] for card in get(front, "/v1/models").json["data"]} == {"scripted", "claude-sonnet"}


def test_codex_gets_every_field_it_cannot_do_without(front: Front) -> None:
    """One missing field would void its list."""
    models = get(front, "/v1/models?client_version=0.169.0").json["models"]
    assert {model["slug"] for model in models} == {"scripted", "claude-sonnet"}
    for model in models:
        assert set(model) >= CODEX_FIELDS
        assert model["context_window"] == CONTEXT_TOKENS


def test_anthropic_gets_a_page_and_single_models(front: Front) -> None:
    """As its clients parse them."""
    headers = {"anthropic-version": "2023-06-01"}
    page = get(front, "/v1/models?limit=1000", **headers).json
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "claude-sonnet", "scripted")
    assert {model["type"] for model in page["data"]} == {"model"}
    assert get(front, "/v1/models/scripted", **headers).json == page["data"][1]


def test_somebody_is_there(front: Front) -> None:
    """Claude Code looks with HEAD / before its first request, without a key."""
    assert call(front, "HEAD", "/").status == 200
    assert get(front, "/").json["name"] == "zmqengine"
