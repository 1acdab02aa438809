"""What a stream's pieces are: one a wake-up, and what ends it goes with the last token."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.http.front import chat, send, serving
from tests.http.scripted import ScriptedClient, ScriptedStream
from zmqengine_client.core.chunks import TokenChunk
from zmqengine_client.errors import WorkerLost
from zmqengine_http import HttpConfig


class FailingStream(ScriptedStream):
    """Fails once everything has been said."""

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        async for chunk in super().__aiter__():
            yield chunk
        raise WorkerLost("it is gone")


class FailingClient(ScriptedClient):
    """Its streams end with an error that comes with the last token."""

    def generate_tokens(self, prompt: Sequence[int], **options: object) -> ScriptedStream:
        said = super().generate_tokens(prompt, **options)
        return FailingStream(self, said._text, said._prompt, options)


def pieces(connection: socket.socket) -> list[bytes]:
    """The chunks of the body of a streamed response, as the server wrote them."""
    data = b""
    with connection:
        while not data.endswith(b"\r\n0\r\n\r\n"):
            received = connection.recv(65536)
            assert received, data
            data += received
    _, _, body = data.partition(b"\r\n\r\n")
    found = []
    while not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return found


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_the_end_of_an_answer_is_one_piece_with_its_last_token(stop: list[str]) -> None:
    """Its finish, its usage and `[DONE]`: who reads it is woken once, and the server writes once."""
    scripted = ScriptedClient(lambda prompt: "abcd")
    body = chat(stream=True, max_tokens=3, stop=stop, stream_options={"include_usage": True})
    with serving(HttpConfig(), lambda address, on_event: scripted) as front:
        first, second, last = pieces(send(front, body))
    assert (first.count(b"data: "), second.count(b"data: ")) == (2, 1)
    assert b'"content":"b"' in second
    events = last.split(b"\n\n")
    assert [b'"content":"c"' in events[0], b'"finish_reason":"length"' in events[1]] == [True, True]
    assert b'"completion_tokens":3' in events[2]
    assert events[3:] == [b"data: [DONE]", b""]


def test_a_choice_of_several_ends_when_it_ends() -> None:
    """Its finish goes with its last token, and does not wait for the other choice."""
    scripted = ScriptedClient(lambda prompt: "ab")
    with serving(HttpConfig(), lambda address, on_event: scripted) as front:
        found = pieces(send(front, chat(stream=True, max_tokens=2, n=2)))
    *choices, done = found
    assert done == b"data: [DONE]\n\n"
    ends = [piece for piece in choices if b'"finish_reason":"length"' in piece]
    assert len(ends) == 2
    assert all(b'"content":"b"' in piece for piece in ends)


def test_a_failure_that_comes_with_the_last_token_takes_no_token_along() -> None:
    """The tokens, then the error: also where the only ones come with it."""
    with serving(HttpConfig(), lambda address, on_event: FailingClient(lambda prompt: "ab")) as front:
        for max_tokens in (1, 2):
            body = pieces(send(front, chat(stream=True, max_tokens=max_tokens)))
            text = b"".join(body)
            assert (b'"content":"a"' in text, b'"content":"b"' in text) == (True, max_tokens == 2)
            assert text.index(b'"content":"') < text.index(b"it is gone")
            assert b"[DONE]" not in text


def test_http_1_0_gets_the_status_of_a_failure() -> None:
    """It is sent nothing before the end, so a failure has its own status even after tokens."""
    with serving(HttpConfig(), lambda address, on_event: FailingClient(lambda prompt: "ab")) as failing:
        data = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 2}'
        with socket.create_connection(("127.0.0.1", failing.port), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            answer = b""
            while received := connection.recv(65536):
                answer += received
    assert answer.split(b" ", 2)[1] == b"503"
    assert b"it is gone" in answer
    assert b'"content"' not in answer
