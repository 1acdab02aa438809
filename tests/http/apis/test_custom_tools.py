"""Custom tools, allowed tools and smaller fields, as the official Python client reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.front import Front, call, get, post, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process

CALL = '<tool_call>{"name": "patch", "arguments": {"input": "line \\"one\\"\\nline two"}}</tool_call>'
INPUT = 'line "one"\nline two'
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Patches", "format": GRAMMAR}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model() -> ScriptedClient:
    return ScriptedClient(
        lambda prompt: CALL if "patch" in prompt and "tool: " not in prompt else "done",
        template=TEMPLATE,
        facts={"tool_parser": "json_tools"},
    )


@pytest.fixture(scope="module")
def front(model: ScriptedClient) -> Iterator[Front]:
    with serving(HttpConfig(), lambda *_: model) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module")
def gpt(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_a_text(gpt: openai.OpenAI, model: ScriptedClient, stream: bool) -> None:
    """The model writes JSON; the client gets the text in it, and sends it back as it came."""
    if stream:
        with gpt.chat.completions.stream(model="scripted", messages=HELLO, tools=[PATCH]) as events:
            chunks = [event.chunk for event in events if event.type == "chunk"]
        deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or []]
        called: Any = {"id": deltas[0].id, "type": deltas[0].type}
        customs: list[Any] = [delta.model_extra["custom"] for delta in deltas if delta.model_extra]
        called["custom"] = {"name": customs[0]["name"], "input": "".join(each["input"] for each in customs)}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        message = (
            gpt.chat.completions.create(model="scripted", messages=HELLO, tools=[PATCH]).choices[0].message
        )
        assert message.tool_calls
        called = message.tool_calls[0].model_dump()
    assert called["type"] == "custom"
    assert called["custom"] == {"name": "patch", "input": INPUT}
    assert "follows this grammar" in model.prompts[-1]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": called["id"], "content": "ok"}]  # fmt: skip
    answer = gpt.chat.completions.create(model="scripted", messages=messages, tools=[PATCH])
    assert answer.choices[0].message.content == "done"
    assert '"input": "line' in model.prompts[-1]


def test_allowed_tools_narrow_what_is_offered(gpt: openai.OpenAI, model: ScriptedClient) -> None:
    """Of both types; one that is not there is refused."""
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
    }
    gpt.chat.completions.create(model="scripted", messages=HELLO, tools=[ADD, PATCH], tool_choice=allowed)  # type: ignore[call-overload]
    assert '"patch"' in model.prompts[-1]
    assert '"add"' not in model.prompts[-1]
    allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "other"}}]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        gpt.chat.completions.create(model="scripted", messages=HELLO, tools=[ADD], tool_choice=allowed)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "function", "custom": {"name": "x"}}]}, "tools[0].function"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
         "messages[1].tool_calls[0].custom"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_a_malformed_tool_is_refused_where_it_stands(
    front: Front, fields: dict[str, Any], param: str
) -> None:
    """By its path."""
    reply = post(front, "/v1/chat/completions", {"messages": HELLO, **fields})
    assert reply.status == 400
    assert reply.error["param"] == param


def test_a_verbosity_is_a_hint_like_an_effort(front: Front) -> None:
    """Taken, and told."""
    reply = post(front, "/v1/chat/completions", {"messages": HELLO, "verbosity": "low"})
    assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "verbosity")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_before_each_of_its_choices(gpt: openai.OpenAI, stream: bool) -> None:
    """Each with its own, streamed or whole."""
    reply = gpt.completions.create(model="scripted", prompt=["one ", "two "], n=2, echo=True, stream=stream)
    if stream:
        texts = ["", "", "", ""]
        for chunk in reply:  # type: ignore[union-attr]
            texts[chunk.choices[0].index] += chunk.choices[0].text  # type: ignore[union-attr]
    else:
        texts = [choice.text for choice in reply.choices]  # type: ignore[union-attr]
    assert texts == ["one done", "one done", "two done", "two done"]


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/v1/messages/batches", {"type", "error", "request_id"}),
        ("/api/push", {"error"}),
        ("/v1/audio/transcriptions", {"error"}),
    ],
)
def test_a_missing_endpoint_is_told_in_the_shape_of_its_api(front: Front, path: str, keys: set[str]) -> None:
    """A 404, whatever the type of the body."""
    reply = call(front, "POST", path, b"--x--", {"content-type": "multipart/form-data; boundary=x"})
    assert reply.status == 404
    assert set(reply.json) == keys
    assert isinstance(reply.json["error"], str) == path.startswith("/api/")


def test_anthropics_list_of_models_has_pages() -> None:
    """By limit, and from either end."""
    client = ScriptedClient(lambda prompt: "", name="m")
    aliases = {"a": "m", "b": "m", "z": "m"}
    with serving(HttpConfig(aliases=aliases), lambda *_: client) as front:  # type: ignore[arg-type, return-value]

        def page(query: str) -> tuple[list[str], bool]:
            reply = get(front, f"/v1/models?{query}", **{"anthropic-version": "2023-06-01"}).json
            return [model["id"] for model in reply["data"]], reply["has_more"]

        assert page("") == (["a", "b", "m", "z"], False)
        assert page("limit=2") == (["a", "b"], True)
        assert page("limit=2&after_id=b") == (["m", "z"], False)
        assert page("limit=1&before_id=m") == (["b"], True)
        refused = get(front, "/v1/models?limit=0", **{"anthropic-version": "2023-06-01"})
        assert refused.status == 400


def test_a_body_that_is_not_utf8_is_told_where(front: Front) -> None:
    """The position is that of the byte."""
    body = b'{"messages": [{"role": "user", "content": "a\xff"}]}'
    reply = call(front, "POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert reply.error["message"].endswith(f"not UTF-8 at byte {body.index(255)}")
