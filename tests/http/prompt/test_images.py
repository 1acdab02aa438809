"""Images through every API, to a model that sees; a model that does not says so as before."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select
from typing import Any

import pytest
from PIL import Image

from tests.http.front import Front, call, post, serving, wait_until
from tests.http.programs.programs_of_others import DIRECTORY, node_wanted, results_of
from tests.http.scripted import ScriptedClient
from tests.support.thread_work import ThreadWork
from tests.support.workers import WorkerProcess
from tools.pico.eye import pictures
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.errors import BadRequest
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.prompt.pictures import Picture, prepared
from zmqengine_http.serving.body_room import BodyRoom

MODEL = "fake"


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is drawn with the same seed: some APIs have none."""
    monkeypatch.setattr("zmqengine_http.generating.generation.choice_seed", lambda seed, number: 7)


@pytest.fixture(scope="module")
def sees() -> Iterator[Front]:
    """A front-end on a worker whose output depends on the hashes of its images."""
    with FakeWorker(FakeEngineConfig(vision=True), process=True) as worker:
        config = HttpConfig(workers=(worker.address,), probe_ms=200, aliases={"*": "fake"})
        with serving(config) as front:
            yield front


def encoded(colour: tuple[int, int, int] = (200, 30, 30), odd: bool = False) -> str:
    """A picture in base64; an odd one differs in one pixel."""
    image = Image.new("RGB", (32, 24), colour)
    if odd:
        image.putpixel((5, 7), (1, 2, 3))
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def url_of(data: str) -> str:
    """As a data URL."""
    return f"data:image/png;base64,{data}"


def chat_body(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A request of chat completions."""
    return {
        "model": MODEL, "temperature": 0, "max_tokens": 8,
        "messages": [{"role": "user", "content": list(parts)}], **fields,
    }  # fmt: skip


def image_part(data: str) -> dict[str, Any]:
    """An image in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


TEXT = {"type": "text", "text": "what is it"}


def openai(data: str) -> tuple[str, dict[str, Any]]:
    """Chat completions."""
    return "/v1/chat/completions", chat_body(image_part(data), TEXT)


def responses(data: str) -> tuple[str, dict[str, Any]]:
    """Responses."""
    content = [
        {"type": "input_image", "image_url": url_of(data)},
        {"type": "input_text", "text": "what is it"},
    ]
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": 8,
        "input": [{"role": "user", "content": content}],
    }
    return "/v1/responses", body


def anthropic(data: str) -> tuple[str, dict[str, Any]]:
    """Messages."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    content = [image, TEXT]
    return "/v1/messages", {
        "model": MODEL, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": content}],
    }  # fmt: skip


def ollama(data: str) -> tuple[str, dict[str, Any]]:
    """Ollama's chat."""
    return "/api/chat", {
        "model": MODEL, "stream": False, "options": {"temperature": 0, "num_predict": 8},
        "messages": [{"role": "user", "content": "what is it", "images": [data]}],
    }  # fmt: skip


APIS = {"openai": openai, "responses": responses, "anthropic": anthropic, "ollama": ollama}


def said(reply: Any) -> str:
    """The text of an answer, whatever its API."""
    assert reply.status == 200, reply.body
    document = json.loads(reply.body)
    if "choices" in document:
        return str(document["choices"][0]["message"]["content"])
    if "output" in document:
        return str(document["output"][0]["content"][0]["text"])
    if "message" in document:
        return str(document["message"]["content"])
    return str(document["content"][0]["text"])


@pytest.mark.parametrize("api", APIS)
def test_an_image_reaches_the_model_through_every_api(sees: Front, api: str) -> None:
    """One image gives one answer, another image another; both have more tokens than the text alone."""
    path, body = APIS[api](encoded())
    first, again = said(post(sees, path, body)), said(post(sees, path, body))
    other = said(post(sees, *APIS[api](encoded(odd=True))))
    assert first == again != other


ASKED = "What do you see?"
SEEN = {("circle", "red"): "A red circle.", ("square", "blue"): "A blue square."}
"""Pictures for the trained model: a thing in a color, and the answer."""


def drawn(kind: str, color: str) -> str:
    """A picture of one thing in the middle, in base64."""
    written = io.BytesIO()
    pictures.picture(pictures.Scene((pictures.Thing(kind, color, 1, 1),))).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


@pytest.fixture(scope="module")
def trained() -> Iterator[Front]:
    """A front-end on a worker of pico-eye."""
    with WorkerProcess(None, model="pico-eye", warm_up_s=0.0) as worker:
        config = HttpConfig(workers=(worker.address,), probe_ms=200, aliases={"*": "pico-eye"})
        with serving(config) as front:
            yield front


@pytest.mark.process
@pytest.mark.parametrize(("thing", "answer"), SEEN.items(), ids=str)
def test_the_sdks_own_image_examples_are_answered(
    trained: Front, thing: tuple[str, str], answer: str
) -> None:
    """As OpenAI's, Anthropic's and Ollama's documents have them: a trained model says what the picture shows."""
    anthropic_sdk = pytest.importorskip("anthropic")
    ollama_sdk = pytest.importorskip("ollama")
    openai_sdk = pytest.importorskip("openai")

    data = drawn(*thing)
    client = openai_sdk.OpenAI(base_url=f"{trained.url}/v1", api_key="none", max_retries=0)
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": ASKED}, image_part(data)]}]
    first = client.chat.completions.create(model="gpt-5", messages=chat, temperature=0)
    assert first.choices[0].message.content == answer
    assert first.usage is not None
    assert first.usage.prompt_tokens > 9
    content: Any = [
        {"role": "user", "content": [
            {"type": "input_text", "text": ASKED}, {"type": "input_image", "image_url": url_of(data)},
        ]}
    ]  # fmt: skip
    second = client.responses.create(model="gpt-5", input=content, temperature=0)
    assert second.output_text == answer
    messages: Any = [
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
            {"type": "text", "text": ASKED},
        ]}
    ]  # fmt: skip
    claude = anthropic_sdk.Anthropic(base_url=trained.url, api_key="none", max_retries=0)
    with claude.messages.stream(
        model="claude", max_tokens=40, messages=messages, extra_body={"temperature": 0}
    ) as stream:
        assert stream.get_final_text() == answer
    image = ollama_sdk.Image(value=base64.b64decode(data))
    fourth = ollama_sdk.Client(trained.url).chat(
        "pico-eye",
        [ollama_sdk.Message(role="user", content=ASKED, images=[image])],
        options={"temperature": 0},
    )
    assert fourth.message.content == answer


@node_wanted
def test_the_sdks_of_node_see(trained: Front, tmp_path: Path) -> None:
    """The AI SDK's example, whole and streamed; once a week its other providers and OpenAI's client too, over chat
    completions, Responses and Messages."""
    results = results_of("images.mjs", trained.url, drawn("circle", "red"), environment="", scratch=tmp_path)
    assert len(results) == (8 if DIRECTORY else 3)
    assert not {result["name"]: result["error"] for result in results if result["error"]}


def test_images_of_a_conversation_and_of_tool_results_keep_their_places(sees: Front) -> None:
    """Also where the results of two calls are followed by a user's picture."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def ask(first: str, second: str) -> str:
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [image_part(first)]},
            {"role": "user", "content": [TEXT, image_part(second)]},
        ]
        return said(post(sees, "/v1/chat/completions", chat_body(messages=messages)))

    a, b = encoded(), encoded((1, 2, 200))
    assert ask(a, b) != ask(b, a)


@pytest.mark.parametrize(
    ("path", "number"), [("/v1/messages/count_tokens", "input_tokens"), ("/tokenize", "count")]
)
def test_tokens_of_an_image_are_counted(sees: Front, path: str, number: str) -> None:
    """A picture of 32 x 24 pixels is 12 features and two marks in place of one."""
    image = (
        image_part(encoded()) if path == "/tokenize" else anthropic(encoded())[1]["messages"][0]["content"][0]
    )

    def count(*parts: Any) -> int:
        body = {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}]}
        return int(json.loads(post(sees, path, body).body)[number])

    assert count(image, TEXT) - count(TEXT) >= 14


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "fetches no URLs"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is a data URL"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "none of PNG|not valid base64"),
        ({"type": "image_url"}, "data URL"),
        (image_part("PHN2Zy8+"), "none of PNG"),
        (image_part(base64.b64encode(base64.b64decode(encoded())[:50]).decode()), "damaged"),
        (image_part("A" * 100), "none of PNG"),
    ],
)
def test_what_is_no_picture_is_a_400_that_says_so(sees: Front, part: dict[str, Any], reason: str) -> None:
    """And the next request is answered."""
    import re

    reply = post(sees, "/v1/chat/completions", chat_body(part, TEXT))
    assert reply.status == 400, reply.body
    message = json.loads(reply.body)["error"]["message"]
    assert re.search(reason, message), message
    said(post(sees, *openai(encoded())))


def test_the_event_loop_does_nothing_of_an_image_but_send_it(sees: Front) -> None:
    """Base64, files, pixels and frames are work of threads, also when tokens are counted."""
    written = io.BytesIO()
    Image.effect_noise((640, 480), 40).convert("RGB").save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    work = ThreadWork()
    sees.loop.call_soon_threadsafe(sys.setprofile, work)
    for api in APIS.values():
        said(post(sees, *api(data)))
    path, body = anthropic(data)
    assert post(sees, f"{path}/count_tokens", {"model": MODEL, "messages": body["messages"]}).status == 200
    sees.loop.call_soon_threadsafe(sys.setprofile, None)
    assert work.calls > 1000
    assert not work.found


def test_requests_with_images_take_turns_and_one_that_left_goes_no_further(
    sees: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty images of 50 megapixels, in a body of 4 MB whose client had left, kept all others waiting for 37 s."""
    order: list[str] = []
    go_on = threading.Event()

    def noted(picture: Picture, model: Any) -> Picture:
        order.append(picture.data[-20:])
        assert go_on.wait(60)
        return prepared(picture, model)

    monkeypatch.setattr("zmqengine_http.prompt.prompts.prepared", noted)
    crowd = [encoded((red, 0, 0)) for red in range(24)]
    one = encoded((0, 9, 0))
    with ThreadPoolExecutor(2) as threads, socket.create_connection(("127.0.0.1", sees.port)) as leaving:
        body = json.dumps(chat_body(*map(image_part, crowd[:12]))).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        leaving.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(order) == 1, "the first is prepared")
        staying = threads.submit(
            post, sees, "/v1/chat/completions", chat_body(*map(image_part, crowd[12:]), TEXT)
        )
        wait_until(lambda: len(order) == 2, "both threads are busy")
        bodies = sees.service.bodies
        two = bodies.held
        alone = threads.submit(post, sees, *openai(one))
        wait_until(lambda: bodies.held > two, "the third has come")
        leaving.close()
        wait_until(lambda: bodies.held < two, "the server has noticed")
        go_on.set()
        assert said(alone.result())
        assert said(staying.result())
    assert order.index(one[-20:]) < 6
    assert sum(data[-20:] in order for data in crowd[:12]) <= 2


def test_no_more_images_are_prepared_than_the_context_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty large ones of one color, in a body of 300 KB, took 600 MB before they were refused."""
    count = 0

    def counted(picture: Picture, model: Any) -> Picture:
        nonlocal count
        count += 1
        return prepared(picture, model)

    monkeypatch.setattr("zmqengine_http.prompt.prompts.prepared", counted)
    with FakeWorker(FakeEngineConfig(vision=True, context_tokens=50)) as worker:
        config = HttpConfig(workers=(worker.address,), probe_ms=200)
        with serving(config) as front:
            wait_until(lambda: bool(front.service.pool.models()), "the model is known")
            images = [image_part(encoded((red, 0, 0))) for red in range(60)]
            reply = post(front, "/v1/chat/completions", chat_body(*images, TEXT))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert 1 < count < 20


def _is_settled(flood: socket.socket, bodies: BodyRoom, held: int) -> bool:
    """Whether all of a body is held, or it has an answer."""
    return bodies.held == held or bool(select([flood], [], [], 0)[0])


def test_a_flood_of_images_takes_bounded_memory_and_texts_go_on(sees: Front) -> None:
    """Bodies that find no room are a 429 before they are read, with the time after which to try again."""
    sent, declared = 20_000, 24_000
    config = HttpConfig(workers=sees.service.config.workers, probe_ms=200, aliases={"*": "fake"})
    config = dataclasses.replace(config, body_bytes_max=32_768)
    with serving(config) as front, contextlib.ExitStack() as stack:
        bodies = front.service.bodies
        refused = b""
        for count in range(1, 60):
            flood = stack.enter_context(socket.create_connection(("127.0.0.1", front.port)))
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                f"content-length: {declared}\r\n\r\n"
            )
            flood.sendall(head.encode() + b" " * sent)
            came = functools.partial(_is_settled, flood, bodies, count * sent)
            wait_until(came, "it is read or refused")
            if bodies.held < count * sent:
                refused = flood.recv(4096)
                break
        assert refused.startswith(b"HTTP/1.1 429"), refused
        assert bodies.held + 4 * declared > 32 * config.body_bytes_max >= bodies.held
        assert b"retry-after: 1\r\n" in refused
        assert said(post(front, "/v1/chat/completions", chat_body(TEXT)))
        wait_until(lambda: bodies.held == (count - 1) * sent, "an ended request holds its body")
        stack.close()
        wait_until(lambda: not bodies.held, "the flood is forgotten")
        assert said(post(front, *openai(encoded())))


def test_a_refused_body_is_read_before_its_connection_is_closed(sees: Front) -> None:
    """Else a client that sends `Connection: close` sees a reset in place of the reason."""
    config = HttpConfig(workers=sees.service.config.workers, probe_ms=200, body_bytes_max=4 << 20)
    with serving(config) as front:
        bodies = front.service.bodies
        bodies.held = held = 31 * config.body_bytes_max
        headers = {"content-type": "application/json", "connection": "close"}
        chunked = headers | {"transfer-encoding": "chunked"}
        large = b"%x\r\n" % (2 << 20) + b" " * (2 << 20) + b"\r\n0\r\n\r\n"
        too_large = b" " * (config.body_bytes_max + (2 << 20))
        cases = (
            (b" " * config.body_bytes_max, headers, 429),
            (large, chunked, 429),
            (too_large, headers, 413),
        )
        for body, given, status in cases:
            reply = call(front, "POST", "/v1/chat/completions", body, given)
            assert reply.status == status
            wait_until(lambda: bodies.held == held, "a refused request holds its body")


def test_urls_are_fetched_where_the_server_may(sees: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each API that has URLs takes the image at one like any other, and a failure names the field."""
    picture = base64.b64decode(encoded())

    def fetch(url: str) -> bytes:
        if "none" in url:
            raise BadRequest("cannot be fetched")
        return picture

    monkeypatch.setattr("zmqengine_http.serving.fetching.fetch", fetch)
    config = HttpConfig(workers=sees.service.config.workers, probe_ms=200, image_urls=True)
    with serving(config) as front:
        model = front.service.pool.model(None).card.name
        url = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
        wanted = said(
            post(front, "/v1/chat/completions", chat_body(image_part(encoded()), TEXT, model=model))
        )
        assert said(post(front, "/v1/chat/completions", chat_body(url, TEXT, model=model))) == wanted
        block = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": [block, TEXT]}]}
        assert said(post(front, "/v1/messages", body))
        none = {"type": "image_url", "image_url": {"url": "https://example.org/none"}}
        refused = post(front, "/v1/chat/completions", chat_body(none, TEXT, model=model))
        assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].image_url")


def test_more_images_than_the_worker_takes_are_a_400(sees: Front) -> None:
    """Before any of them is decoded."""
    reply = post(sees, "/v1/chat/completions", chat_body(*[image_part("AAAA")] * 65, TEXT))
    assert reply.status == 400
    assert "65, the worker takes 64" in json.loads(reply.body)["error"]["message"]


def test_a_user_cannot_forge_the_place_of_an_image(sees: Front) -> None:
    """Neither by the model's marker nor by ours: a text that named an image would show it as often as it likes."""
    forged = {"type": "text", "text": "<image> \ufdd00\ufdd1 \ufdd077\ufdd1 what"}
    said(post(sees, "/v1/chat/completions", chat_body(forged, image_part(encoded()))))
    said(post(sees, "/v1/chat/completions", chat_body(forged)))
    many = {"type": "text", "text": "\ufdd00\ufdd1" * 65}
    said(post(sees, "/v1/chat/completions", chat_body(image_part(encoded()), many)))


def test_an_image_in_an_answer_that_is_continued_is_a_400(sees: Front) -> None:
    """Its place is no text: the model would read our mark for it."""
    messages = [
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": [image_part(encoded()), TEXT]},
    ]
    reply = post(sees, "/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert reply.status == 400
    assert "no image can be in it" in reply.error["message"]


def test_programs_are_told_that_the_model_sees(sees: Front) -> None:
    """Ollama's and Codex's leave out images otherwise, or refuse to attach any."""
    assert "vision" in post(sees, "/api/show", {"model": MODEL}).json["capabilities"]
    models = call(sees, "GET", "/v1/models?client_version=1").json["models"]
    assert {tuple(model["input_modalities"]) for model in models} == {("text", "image")}


def test_images_of_a_raw_prompt_are_a_400(sees: Front) -> None:
    """No template writes their places; they were left out."""
    reply = post(sees, "/api/generate", {"model": MODEL, "prompt": "x", "images": [encoded()], "raw": True})
    assert reply.status == 400
    assert "images" in reply.json["error"]


@pytest.mark.parametrize("api", APIS)
def test_a_model_without_a_card_refuses_by_name(front: Front, api: str) -> None:
    """In the newest message, as before."""
    path, body = APIS[api](encoded())
    body["model"] = front.service.pool.model(None).card.name
    reply = post(front, path, body)
    assert reply.status == 400
    assert b"reads text only" in reply.body


@pytest.mark.parametrize("api", APIS)
def test_a_model_that_was_made_to_see_says_why_it_does_not(api: str) -> None:
    """The reason is the worker's, a fact of its tokenizer."""
    client = ScriptedClient(
        lambda prompt: "x", facts={"blind": "images of a gemma3 are not supported: its ..."}
    )
    with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type]
        path, body = APIS[api](encoded())
        reply = post(front, path, {**body, "model": "scripted"})
        assert reply.status == 400
        assert b"reads text only (images of a gemma3 are not supported: its ...)" in reply.body
    with pytest.raises(BadRequest, match=r"sees no images \(images of a gemma3"):
        _ = client._tokenizer.vision_card
