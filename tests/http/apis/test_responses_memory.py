"""Conversations that the front-end remembers, as the official Python client continues them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.agents.scripted_agent import FACTS, TEMPLATE, say
from tests.http.front import Front, call, get, post, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig
from zmqengine_http.apis import responses
from zmqengine_http.apis.responses import response_memory
from zmqengine_http.apis.responses.request import Item
from zmqengine_http.apis.responses.response_memory import ResponseMemory
from zmqengine_http.serving.errors import ApiError

pytestmark = pytest.mark.process

KEYS = ("a-long-enough-key", "another-long-key")
SHELL = {"type": "function", "name": "bash", "strict": False, "parameters": {"type": "object"}}
QUESTION = "use a tool"


@pytest.fixture(scope="module")
def model() -> ScriptedClient:
    return ScriptedClient(say, template=TEMPLATE, facts=FACTS)


@pytest.fixture(scope="module")
def front(model: ScriptedClient) -> Iterator[Front]:
    with serving(HttpConfig(api_keys=KEYS), lambda *_: model) as front:  # type: ignore[arg-type, return-value]
        yield front


@pytest.fixture(scope="module")
def gpt(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_by_its_id(gpt: openai.OpenAI, model: ScriptedClient, stream: bool) -> None:
    """A tool loop and a further question, each request with only what is new."""
    if stream:
        with gpt.responses.stream(model="scripted", input=QUESTION, tools=[SHELL]) as events:  # type: ignore[list-item]
            for _ in events:
                pass
            first = events.get_final_response()
    else:
        first = gpt.responses.create(model="scripted", input=QUESTION, tools=[SHELL])  # type: ignore[assignment, arg-type, list-item, call-overload]
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = gpt.responses.create(
        model="scripted",
        previous_response_id=first.id,
        input=[result],
        tools=[SHELL],  # type: ignore[list-item]
    )
    assert second.output_text == "The tool said: 42"
    assert second.previous_response_id == first.id
    third = gpt.responses.create(model="scripted", previous_response_id=second.id, input="thanks")
    prompt = model.prompts[-1]
    places = [prompt.index(text) for text in (QUESTION, "42", "The tool said: 42", "thanks")]
    assert places == sorted(places)
    assert gpt.responses.retrieve(third.id).output_text == third.output_text
    assert third.store  # type: ignore[attr-defined, unused-ignore]


def test_instructions_are_those_of_the_request_alone(gpt: openai.OpenAI, model: ScriptedClient) -> None:
    """As OpenAI has it: an earlier system prompt can be exchanged."""
    first = gpt.responses.create(model="scripted", input="hello", instructions="be brief")
    gpt.responses.create(
        model="scripted", previous_response_id=first.id, input="go on", instructions="be long"
    )
    assert "be long" in model.prompts[-1]
    assert "be brief" not in model.prompts[-1]


def test_a_response_of_another_key_or_not_stored_is_not_found(gpt: openai.OpenAI, front: Front) -> None:
    """The error has OpenAI's code, and says what to do."""
    kept = gpt.responses.create(model="scripted", input="hello")
    dropped = gpt.responses.create(model="scripted", input="hello", store=False)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEYS[1], max_retries=0) as stranger:
        for client, id_ in ((stranger, kept.id), (gpt, dropped.id), (gpt, "resp_nothing")):
            with pytest.raises(openai.BadRequestError, match="send the whole conversation") as refused:
                client.responses.create(model="scripted", previous_response_id=id_, input="go on")
            assert refused.value.code == "previous_response_not_found"
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(id_)


def test_tokens_are_counted_before_they_are_spent(gpt: openai.OpenAI) -> None:
    """With the remembered conversation and the tools, as the response will count them."""
    first = gpt.responses.create(model="scripted", input="hello", instructions="be brief")
    assert first.usage
    counted = gpt.responses.input_tokens.count(model="scripted", input="hello", instructions="be brief")
    assert counted.input_tokens == first.usage.input_tokens
    more = gpt.responses.input_tokens.count(model="scripted", previous_response_id=first.id, input="hello")
    assert more.input_tokens > counted.input_tokens


def test_the_oldest_conversations_are_forgotten_first() -> None:
    """Reading one keeps all of its turns; a broken one is not found at all."""

    def turn(memory: ResponseMemory, id_: str, previous: str | None = None) -> None:
        items = [Item(role="user", content="x" * 1000)]
        memory.remember("owner", previous, items, {"id": id_, "output": []})

    memory = ResponseMemory(bytes_max=5000)
    turn(memory, "a1")
    turn(memory, "b1")
    turn(memory, "a2", "a1")
    found = memory.conversation("owner", "a2")
    assert found is not None
    assert len(found) == 2
    turn(memory, "c1")
    turn(memory, "d1")
    assert memory.conversation("owner", "b1") is None
    assert memory.conversation("owner", "a2") is not None
    assert memory.conversation("other", "a2") is None
    for number in range(5):
        turn(memory, f"e{number}")
    assert memory.conversation("owner", "a2") is None


@pytest.mark.parametrize("parts", [1, 50])
def test_a_conversation_has_no_more_objects_than_a_request(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred turns of 20,000 items each fit the memory, and would hold the loop for seconds."""
    monkeypatch.setattr(response_memory, "OBJECTS_MAX", 1000)
    memory = ResponseMemory()
    previous: str | None = None
    item = Item(role="user", content=[{"type": "input_text", "text": "a"}] * parts)
    for number in range(30):
        memory.remember("o", previous, [item] * (100 // (1 + parts)), {"id": f"r{number}", "output": []})
        previous = f"r{number}"
    assert memory.conversation("o", "r8") is not None
    with pytest.raises(ApiError, match="more than the 1000 objects") as refused:
        memory.conversation("o", "r29")
    assert (refused.value.status, refused.value.param) == (400, "previous_response_id")


def test_each_owner_has_a_share_of_the_memory() -> None:
    """Whoever holds most gives way, however much and how fast it stores."""
    memory = ResponseMemory(bytes_max=100_000)
    memory.remember("a", None, [Item(role="user", content="remember me")], {"id": "a1", "output": []})
    for number in range(50):
        item = Item(role="user", content="x" * 30_000)
        memory.remember("b", None, [item], {"id": f"b{number}", "output": []})
    memory.remember("b", None, [Item(role="user", content="x" * 200_000)], {"id": "all", "output": []})
    assert memory.find("a", "a1") is not None
    assert memory.find("b", "b0") is None


def test_the_owner_is_the_accepted_key(front: Front) -> None:
    """Whatever other headers of a key there are, and whichever of them holds it."""
    stored = post(front, "/v1/responses", {"model": "scripted", "input": "hello"}, **{"x-api-key": KEYS[0]})
    path = f"/v1/responses/{stored.json['id']}"
    assert get(front, path, authorization=f"Bearer {KEYS[0]}").status == 200
    assert get(front, path, authorization="Basic shared", **{"x-api-key": KEYS[0]}).status == 200
    assert get(front, path, authorization="Basic shared", **{"x-api-key": KEYS[1]}).status == 404
    item = stored.json["output"][-1]["id"]
    body = {"model": "scripted", "input": [{"type": "item_reference", "id": item}]}
    assert post(front, "/v1/responses", body, **{"api-key": KEYS[0]}).status == 200
    assert post(front, "/v1/responses", body, **{"api-key": KEYS[1]}).status == 400


def test_a_response_is_listed_and_forgotten_by_its_owner(gpt: openai.OpenAI, front: Front) -> None:
    """What was stored can be deleted: with it go its items, and nobody can go on from it."""
    asked = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    stored = gpt.responses.create(model="scripted", input=[*asked, {"role": "user", "content": "three"}])  # type: ignore[list-item]
    listed = gpt.responses.input_items.list(stored.id, order="asc", limit=2)
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == ["one", "two", "three"], "the client asks for the second page itself"
    newest = gpt.responses.input_items.list(stored.id).data[0]
    assert newest.content[0].text == "three"  # type: ignore[union-attr]
    path = f"/v1/responses/{stored.id}"
    stranger = {"authorization": f"Bearer {KEYS[1]}"}
    assert call(front, "DELETE", path, None, stranger).status == 404
    assert call(front, "GET", f"{path}/input_items", None, stranger).status == 404
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert get(front, f"{path}/input_items?{query}", authorization=f"Bearer {KEYS[0]}").status == 400
    gpt.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(stored.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.delete(stored.id)
    with pytest.raises(openai.BadRequestError):
        gpt.responses.create(model="scripted", previous_response_id=stored.id, input="go on")
    reference: Any = {"type": "item_reference", "id": stored.output[-1].id}
    with pytest.raises(openai.BadRequestError, match="there is no item"):
        gpt.responses.create(model="scripted", input=[reference])
    wrong = call(front, "PATCH", path, None, {"authorization": f"Bearer {KEYS[0]}"})
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, DELETE")


def test_azures_paths_are_the_same_endpoints(front: Front) -> None:
    """By deployment, which is the model, and in the new form without one."""
    with openai.AzureOpenAI(
        azure_endpoint=front.url, api_key=KEYS[0], api_version="2024-10-21", max_retries=0
    ) as azure:
        said = azure.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hello"}]
        )
        assert said.model == "scripted"
        assert azure.responses.create(model="scripted", input="hello").output_text
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            azure.chat.completions.create(model="other", messages=[{"role": "user", "content": "hello"}])
    path = "/openai/deployments/scripted/completions?api-version=1"
    assert post(front, path, {"prompt": "hello"}, **{"api-key": KEYS[0]}).json["model"] == "scripted"
    assert post(front, path, {"prompt": "hello"}).status == 401
    assert get(front, "/openai/v1/models", **{"api-key": KEYS[0]}).json["data"][0]["id"] == "scripted"


def test_sound_is_refused_with_a_pointer(front: Front) -> None:
    """A 404 alone leaves a user to search."""
    refused = call(front, "POST", "/v1/audio/transcriptions", b"", {})
    assert refused.status == 404
    assert "whisper.cpp" in refused.json["error"]["message"]


def test_what_is_skipped_is_not_stored(front: Front) -> None:
    """Unknown items of megabytes would flush what is worth keeping."""
    items = [{"type": f"unknown{number}", "content": "y" * 1000} for number in range(100)]
    body = {"model": "scripted", "input": [*items, {"role": "user", "content": "hello"}]}
    stored = post(front, "/v1/responses", body, **{"x-api-key": KEYS[0]})
    assert stored.status == 200
    (kept,) = [
        value[0]
        for values in responses._RESPONSES._responses._values.values()
        for id_, value in values.items()
        if id_ == stored.json["id"]
    ]
    assert len(kept.items) < 200
