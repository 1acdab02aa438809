"""Tool calls through the real gateway: it lays out the tools and reads the calls, the model only talks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")

from tests.http.scripted import ScriptedClient, ScriptedStream
from tests.smg.real_gateway import RealGateway
from tests.support.ports import free_port
from zmqengine.protocol.messages import Status
from zmqengine_smg import SmgConfig
from zmqengine_smg.grpc_server import serve_grpc
from zmqengine_smg.upstream import Upstream

pytestmark = pytest.mark.process

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class _Stream(ScriptedStream):
    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class _Client(ScriptedClient):
    """A scripted model behind an adapter."""

    async def status(self) -> Status:
        return Status(0, bytes(8), "ready", 1.0, 0.0, {}, {})

    def generate_tokens(self, prompt: Any, **options: object) -> _Stream:
        text = self._tokenizer.decode(prompt)
        self.prompts.append(text)
        return _Stream(self, text, list(prompt), options)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[RealGateway, _Client]]:
    """A gateway that reads tool calls as Qwen writes them, in front of a model that makes one when it sees a tool."""
    client = _Client(lambda prompt: CALL if "weather" in prompt else "Hello.", name="fake")
    address = f"127.0.0.1:{free_port()}"
    stopping: list[Any] = []

    async def serve() -> None:
        upstream = Upstream("scripted")
        upstream.client = client  # type: ignore[assignment]
        event = asyncio.Event()
        stopping.append((asyncio.get_running_loop(), event))
        following = asyncio.create_task(upstream.run())
        await serve_grpc(SmgConfig(listen=address), upstream, event)
        following.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    gateway = RealGateway([f"grpc://{address}"], tmp_path / "log", "--tool-call-parser", "qwen")
    try:
        gateway.wait_ready()
        yield gateway, client
    finally:
        gateway.kill()
        loop, event = stopping[0]
        loop.call_soon_threadsafe(event.set)
        thread.join(60)
    assert not thread.is_alive()


def test_a_tool_is_called(gateway: tuple[RealGateway, _Client]) -> None:
    """Whole and streamed; the tool stood in the prompt by the worker's own template."""
    front, client = gateway
    body = {
        "messages": [{"role": "user", "content": "How is it in Oslo?"}],
        "tools": [TOOL],
        "max_tokens": 200,
    }
    answer = front.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert "The weather in a city." in client.prompts[-1]

    events = front.ask("/v1/chat/completions", body | {"stream": True}).events
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(call.get("name") or "" for call in calls) == "weather"
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"city": "Oslo"}

    plain = front.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    )
    assert plain.json["choices"][0]["message"]["content"] == "Hello."
    assert plain.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
