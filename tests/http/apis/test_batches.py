"""Files and batches, as the official Python client uses them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.front import Front, call, get, post, serving
from tests.http.scripted import ScriptedClient
from tests.support.workers import wait_until
from zmqengine_http import HttpConfig
from zmqengine_http.batches import job as batch_module
from zmqengine_http.batches import stored_files as storage

pytestmark = pytest.mark.process

KEYS = ("a-long-enough-key", "another-long-key")
CHATS = "/v1/chat/completions"
Line = Mapping[str, Any]


def line(name: str, text: str = "Hi", url: str = CHATS, **more: Any) -> Line:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Line]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


@pytest.fixture
def model() -> ScriptedClient:
    return ScriptedClient(lambda prompt: f"about {prompt.split()[-1]}", template="{{ messages[0].content }}")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "zmqengine"


@pytest.fixture
def front(model: ScriptedClient, root: Path) -> Iterator[Front]:
    with serving(HttpConfig(api_keys=KEYS), lambda *_: model) as front:  # type: ignore[arg-type, return-value]
        yield front


def client_of(front: Front, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)


def begin(client: openai.OpenAI, lines: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")


def ended(client: openai.OpenAI, id_: str) -> Any:
    wait_until(lambda: client.batches.retrieve(id_).status in batch_module.ENDED, "the batch goes on")
    return client.batches.retrieve(id_)


def results(client: openai.OpenAI, id_: str | None) -> dict[str, Any]:
    assert id_ is not None
    lines = [json.loads(text) for text in client.files.content(id_).text.splitlines()]
    return {each["custom_id"]: each["response"] for each in lines}


def test_a_batch_answers_every_line_behind_all_others(front: Front, model: ScriptedClient) -> None:
    """Results and errors are files; the priority is that of batch work unless the line has one."""
    with client_of(front) as client:
        lines = [line(str(number), f"number {number}") for number in range(40)]
        lines += [line("urgent", priority=-3), line("wrong", temperature=9), line("streams", stream=True)]
        batch = ended(client, begin(client, jsonl(lines)).id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 43, "completed": 42, "failed": 1}
        answers = results(client, batch.output_file_id)
        assert answers["7"]["body"]["choices"][0]["message"]["content"] == "about 7"
        assert answers["7"]["status_code"] == 200
        assert "streams" in answers
        (failed,) = results(client, batch.error_file_id).values()
        assert (failed["status_code"], failed["body"]["error"]["param"]) == (400, "temperature")
        assert {options["priority"] for options in model.options} == {-3, 1}
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.purpose for each in client.files.list()} == {"batch", "batch_output"}


def test_each_key_has_its_own(front: Front) -> None:
    """Another one finds neither files nor batches."""
    with client_of(front) as client, client_of(front, KEYS[1]) as stranger:
        batch = ended(client, begin(client, jsonl([line("a")])).id)
        assert [*stranger.files.list(), *stranger.batches.list()] == []
        for ask in (
            lambda: stranger.files.content(batch.output_file_id),
            lambda: stranger.files.delete(batch.input_file_id),
            lambda: stranger.batches.retrieve(batch.id),
            lambda: stranger.batches.cancel(batch.id),
            lambda: begin_on(stranger, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)


def begin_on(client: openai.OpenAI, file: str) -> object:
    return client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h")


def test_a_wrong_line_fails_the_batch_by_its_number(front: Front, model: ScriptedClient) -> None:
    """Before anything is answered."""
    lines = jsonl([line("a"), line("a"), line("b", url="/v1/other")]) + b"\nnothing\n"
    with client_of(front) as client:
        batch = client.batches.retrieve(begin(client, lines).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        told = [(error.line, error.code) for error in batch.errors.data or ()]
        assert told == [(2, "duplicate_custom_id"), (3, "invalid_url"), (4, "invalid_json_line")]
        assert client.batches.retrieve(begin(client, b"\n").id).status == "failed"
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/responses", completion_window="24h"
            )
    assert model.prompts == []


class Held:
    """A model that answers when it is let."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.asked = 0
        self.client = ScriptedClient(self.say, template="{{ messages[0].content }}")

    def say(self, prompt: str) -> str:
        self.asked += 1
        return prompt if self.let.acquire(timeout=0) else self.refuse()

    def refuse(self) -> str:
        from zmqengine.errors import Overloaded

        raise Overloaded("full", retry_after_ms=20)


def test_a_batch_goes_on_after_a_restart(root: Path) -> None:
    """Where it ended: no line is answered twice, and one that was cut off is answered again."""
    held = Held()
    connect: Callable[..., Any] = lambda *_: held.client  # noqa: E731
    lines = jsonl([line(str(number), f"line{number}") for number in range(20)])
    for _ in range(5):
        held.let.release()
    with serving(HttpConfig(), connect) as front, client_of(front) as client:
        id_ = begin(client, lines).id
        wait_until(lambda: client.batches.retrieve(id_).request_counts.completed == 5, "no line is answered")  # type: ignore[union-attr]
    (output,) = (
        path for path in (root / "files" / "local").glob("file-*") if b"status_code" in path.read_bytes()
    )
    with output.open("ab") as file:
        file.write(b'{"custom_id": "6", "resp')
    for _ in range(15):
        held.let.release()
    with serving(HttpConfig(), connect) as front, client_of(front) as client:
        batch = ended(client, id_)
        assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
        texts = results(client, batch.output_file_id)
        assert {each["body"]["choices"][0]["message"]["content"] for each in texts.values()} == {
            f"line{number}" for number in range(20)
        }
        assert len(client.files.content(batch.output_file_id).text.splitlines()) == 20


def test_a_batch_is_cancelled_and_keeps_what_it_has(root: Path) -> None:
    """A full worker is asked again until then; the input stays while it is read."""
    held = Held()
    held.let.release()
    with serving(HttpConfig(), lambda *_: held.client) as front, client_of(front) as client:  # type: ignore[arg-type, return-value]
        batch = begin(client, jsonl([line(str(number)) for number in range(20)]))
        wait_until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, "nothing is answered"
        )  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="reads it"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = ended(client, batch.id)
        assert done.status == "cancelled"
        assert len(results(client, done.output_file_id)) == 1
        assert client.batches.cancel(batch.id).status == "cancelled"


def test_what_is_no_form_or_too_much_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no name in a path leads out of the caller's files."""
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert call(front, "POST", "/v1/files", b"{}", {**key, "content-type": "application/json"}).status == 415
    form = {**key, "content-type": "multipart/form-data; boundary=x"}
    assert call(front, "POST", "/v1/files", b"nothing", form).status == 400
    with client_of(front) as client:
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a", b"x"), purpose="vision")
        binary = bytes(range(256)) + b"\r\n--almost\r\n\n"
        kept = client.files.create(file=("a.bin", binary), purpose="batch")
        assert client.files.content(kept.id).content == binary
        monkeypatch.setattr(storage, "OWNER_BYTES_MAX", 400)
        with pytest.raises(openai.APIStatusError, match="delete some"):
            client.files.create(file=("b", binary), purpose="batch")
    for name in ("..%2f..%2fbatches", "file-" + "0" * 24, "file-x"):
        assert get(front, f"/v1/files/{name}", **key).status == 404
    assert post(front, "/v1/batches", {"input_file_id": "../x", "endpoint": CHATS}, **key).status == 404
    assert get(front, "/v1/files").status == 401
