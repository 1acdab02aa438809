"""Messages and Responses beside chat completions: tokens a second and time to the first text, in turns.

    python -m tests.http.agents.compare_apis --model DIRECTORY --users 32

One worker and one front-end, each a process; every round runs each API once, so that what else the machine does hits
all of them alike. Ratios are to chat completions of the same round.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import click
import psutil

from tests.http.agents.requests import words
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

PORT = 18471
APIS: dict[str, tuple[str, bytes]] = {
    "chat": ("/v1/chat/completions", b'"content":"'),
    "messages": ("/v1/messages", b"text_delta"),
    "responses": ("/v1/responses", b"output_text.delta"),
}


class Outcome(NamedTuple):
    """Of one round of one API; `cpu_s` is what the front-end took."""

    tokens_per_s: float
    first_s: float
    cpu_s: float


async def stream(api: str, prompt: str, tokens: int) -> float:
    """One request to its end; seconds to its first text."""
    path, mark = APIS[api]
    body: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
    if api == "responses":
        body |= {"input": prompt, "max_output_tokens": tokens}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    data = json.dumps(body).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    first, received = 0.0, b""
    while chunk := await reader.read(65536):
        received += chunk
        # The role comes with an empty content.
        if not first and mark in received.replace(b'"content":""', b""):
            first = time.perf_counter() - started
    writer.close()
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
    assert first
    return first


async def one_round(front: psutil.Process, api: str, number: int, users: int, tokens: int) -> Outcome:
    """All users at once, with prompts of their own."""
    prompts = [words(random.Random(f"{number} {api} {user}"), 300) for user in range(users)]
    started, before = time.perf_counter(), sum(front.cpu_times()[:2])
    firsts = await asyncio.gather(*(stream(api, prompt, tokens) for prompt in prompts))
    rate = users * tokens / (time.perf_counter() - started)
    return Outcome(rate, statistics.median(firsts), sum(front.cpu_times()[:2]) - before)


async def compare(front: psutil.Process, users: int, tokens: int, rounds: int) -> None:
    """Print the median ratios."""
    ratios: dict[str, list[Outcome]] = {"messages": [], "responses": []}
    for number in range(-1, rounds):
        order = list(APIS) if number % 2 else list(APIS)[::-1]
        outcomes = {api: await one_round(front, api, number, users, tokens) for api in order}
        if number < 0:
            continue
        print(
            number,
            {
                api: (round(o.tokens_per_s), round(o.first_s, 3), round(o.cpu_s, 3))
                for api, o in outcomes.items()
            },
            flush=True,
        )
        for api, found in ratios.items():
            one, chat = outcomes[api], outcomes["chat"]
            found.append(Outcome(*(mine / theirs for mine, theirs in zip(one, chat, strict=True))))
    for api, found in ratios.items():
        rate = statistics.median(each.tokens_per_s for each in found)
        first = statistics.median(each.first_s for each in found)
        cpu = statistics.median(each.cpu_s for each in found)
        print(
            f"{api} to chat: tokens/s {rate:.3f}, time to first text {first:.3f}, CPU of the front-end {cpu:.3f}"
        )


@click.command()
@click.option("--model", required=True, help="A directory, or `fake` for what the front-end alone costs.")
@click.option("--users", default=32)
@click.option("--tokens", default=48)
@click.option("--rounds", default=6)
def main(model: str, users: int, tokens: int, rounds: int) -> None:
    """Start both, compare, end both."""
    fake = FakeEngineConfig(step_ms=5) if model == "fake" else None
    with WorkerProcess(fake, **({} if fake else {"model": model}), supervise=False) as worker:
        worker.wait_ready()
        front = subprocess.Popen(
            [
                sys.executable, "-m", "zmqengine.cli.main", "http", "--worker", worker.address,
                "--port", str(PORT), "--alias", "*=" + model.rstrip("/").rsplit("/", 1)[-1], "--log-level", "error",
            ]
        )  # fmt: skip
        try:
            time.sleep(3)
            asyncio.run(compare(psutil.Process(front.pid), users, tokens, rounds))
        finally:
            front.terminate()
            front.wait(60)


if __name__ == "__main__":
    main()
