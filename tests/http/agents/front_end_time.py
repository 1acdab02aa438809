"""How long a front-end takes from an agent's request to the worker's insert.

    python -m tests.http.agents.front_end_time

In one process, without sockets: the application is given the request as a server would, and the stand-in for the
client notes when it is asked to generate. The tokenizer is a byte-level BPE of 8,192 tokens. CPU time is that of all
threads.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from typing import Any, NamedTuple

from tests.http.agents.requests import claude_request, words
from tests.http.agents.scripted_agent import FACTS, TEMPLATE
from tests.http.scripted import ScriptedClient, ScriptedStream
from zmqengine.bench.models.random_tokenizer import train_tokenizer
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http import HttpApp, HttpConfig

ROUNDS = 15
MARKERS = ["<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]


class Spent(NamedTuple):
    """Seconds until the insert."""

    wall: float
    cpu: float


class NotingClient(ScriptedClient):
    """Notes when it is asked to generate."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "x", template=TEMPLATE, facts=FACTS, context_tokens=200_000)
        self.asked = Spent(0.0, 0.0)
        tokenizer = train_tokenizer(8192, 0)
        tokenizer.add_special_tokens(MARKERS)
        bundle = TokenizerBundle(
            call=0, hash="bpe", tokenizer_json=tokenizer.to_str().encode(), chat_template=TEMPLATE,
            eos_token_ids=[0], facts=FACTS,
        )  # fmt: skip
        self._tokenizer = Tokenizer(bundle)

    def generate_tokens(self, prompt: Any, **options: object) -> ScriptedStream:
        self.asked = Spent(time.perf_counter(), time.process_time())
        return super().generate_tokens(prompt, **options)


async def measure() -> None:
    """Print the median and the least of each case."""
    client = NotingClient()
    app = HttpApp(HttpConfig(aliases={"claude-sonnet-4-6": "scripted"}), lambda *_: client)  # type: ignore[arg-type, return-value]
    spent: dict[str, list[Spent]] = {"all new": [], "the tail new": []}
    async with app._lifespan(app):
        while not app.service.pool.ready:
            await asyncio.sleep(0.01)
        for number in range(ROUNDS):
            messages, answered = _conversation(number)
            first, second = claude_request(messages, 1), claude_request(messages + answered, 2)
            for body in (first, second):
                # Nothing of an earlier round is known.
                body["system"][2]["text"] = body["tools"][0]["description"] = (
                    f"{number} {body['system'][2]['text']}"
                )
            spent["all new"].append(await _timed(app, client, first))
            spent["the tail new"].append(await _timed(app, client, second))
    print(f"{len(json.dumps(second))} bytes, {len(second['tools'])} tools")
    for name, times in spent.items():
        wall, cpu = ([getattr(each, field) * 1000 for each in times] for field in ("wall", "cpu"))
        print(
            f"{name}: wall median {statistics.median(wall):.1f} ms, least {min(wall):.1f} ms; "
            f"CPU median {statistics.median(cpu):.1f} ms"
        )


def _conversation(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    choose = random.Random(seed)
    call = {"type": "tool_use", "id": "c", "name": "Tool1", "input": {"field_0": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": words(choose, 2000)}
    return (
        [{"role": "user", "content": words(choose, 500)}],
        [
            {"role": "assistant", "content": [{"type": "text", "text": "ok"}, call]},
            {"role": "user", "content": [result]},
        ],
    )


async def _timed(app: HttpApp, client: NotingClient, body: dict[str, Any]) -> Spent:
    data = json.dumps(body).encode()
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/messages", "raw_path": b"/v1/messages", "root_path": "",
        "query_string": b"", "headers": [(b"host", b"localhost")], "scheme": "http", "http_version": "1.1",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    given = False
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    started = Spent(time.perf_counter(), time.process_time())
    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return Spent(client.asked.wall - started.wall, client.asked.cpu - started.cpu)


if __name__ == "__main__":
    asyncio.run(measure())
