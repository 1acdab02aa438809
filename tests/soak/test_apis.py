"""Random constraints, tools, stop strings, log-probabilities and aborts over four HTTP APIs, against one worker.

For $ZMQENGINE_SOAK_SECONDS, twenty if it is not set; by hand it is run with 3600.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import psutil
import pytest

from tests.http.test_constrained import tool_directory
from tests.support.hostile_constraints import OVER_A_LIMIT_PATTERN
from tests.support.workers import WorkerProcess, wait_until

SECONDS = float(os.environ.get("ZMQENGINE_SOAK_SECONDS", "20"))
VISITORS = 8
SAMPLES = 10
"""Lines that are printed. Memory is compared at rest, after half of the time and at the end."""
IDLE_S = 7.0
"""An idle worker gives memory back after five seconds."""
GROWN_BYTES_MAX = 48 << 20
SILENT_S_MAX = float(os.environ.get("ZMQENGINE_SOAK_SILENT_S", "10"))
"""A bound on hangs: the machine may be busy. What was measured is printed."""
REQUEST_S = 120.0
WORDS = ("home", "happy", "little", "garden", "the sun")
PATTERNS = (
    "(dog|cat|boy|girl) .{0,60}(home|happy)",
    "[A-Z][a-z]{2,9}",
    "[0-9]{2,4}-[a-z]+",
    OVER_A_LIMIT_PATTERN,
)
REGEXES = ("[0-9]{4}", "(yes|no|perhaps)( [a-z]{1,8}){0,6}", *PATTERNS)
# Statuses of refusals that are right: a constraint that is too complex, an output over a limit of its constraint.
FINE = (200, 400, 422)


class Asked(NamedTuple):
    """A request: its path and body, and what a whole output of it has to satisfy, if anything."""

    path: str
    body: dict[str, Any]
    schema: Any = None
    pattern: str = ""


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A strict schema of any kind; objects at the root."""
    kind = (
        "object"
        if not depth
        else chance.choice(("string", "text", "pattern", "integer", "enum", "array", "object"))
    )
    match kind:
        case "object" if depth < 3:
            names = chance.sample(("name", "age", "city", "kind", "note", "items"), chance.randint(1, 4))
            members = {name: random_schema(chance, depth + 1) for name in names}
            return {"type": "object", "properties": members, "required": names, "additionalProperties": False}
        case "array" if depth < 3:
            return {
                "type": "array",
                "items": random_schema(chance, depth + 1),
                "maxItems": chance.randint(0, 4),
            }
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": chance.choice((9, 120, 10_000))}
        case "enum":
            return {"enum": chance.sample([*WORDS, 1, None, True], 3)}
        case "text":
            return {"type": "string", "maxLength": chance.choice((8, 40, 2000))}
        case "pattern":
            return {"type": "string", "pattern": f"^{chance.choice(PATTERNS)}$", "maxLength": 2000}
        case _:
            return {"type": "string", "maxLength": 12}


def random_request(chance: random.Random) -> Asked:
    """Any API, with a schema, a tool, a regular expression or nothing, and any of the other wishes."""
    api = chance.choice(("chat", "completions", "messages", "responses"))
    wish = chance.choice(("schema", "tool", "regex", "free"))
    tokens, text = chance.choice((20, 120, 300)), f"Tell me about {chance.choice(WORDS)}."
    body: dict[str, Any] = {
        "model": "tools",
        "temperature": chance.choice((0, 0.7, 1.0)),
        "stream": chance.random() < 0.5,
    }
    schema, pattern = random_schema(chance), ""
    if (wish == "tool" and api == "completions") or (wish == "regex" and api in ("messages", "responses")):
        wish = "schema" if api != "completions" else "free"
    named = {"name": "answer", "strict": True, "schema": schema}
    function = {"name": "act", "strict": True, "parameters": schema}
    if wish == "regex":
        body["guided_regex"] = pattern = chance.choice(REGEXES)
    match api:
        case "chat":
            body |= {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "seed": chance.randrange(9),
            }
            if wish == "schema":
                body["response_format"] = {"type": "json_schema", "json_schema": named}
            if wish == "tool":
                body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
                body["parallel_tool_calls"] = False
            if chance.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        case "completions":
            body |= {"prompt": text, "max_tokens": tokens, "n": chance.choice((1, 1, 3))}
            if wish == "schema":
                body["guided_json"] = schema
            if chance.random() < 0.3:
                body["logprobs"] = chance.randint(0, 5)
        case "messages":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
            if wish == "schema":
                body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
            if wish == "tool":
                body["tools"] = [{"name": "act", "strict": True, "input_schema": schema}]
                body["tool_choice"] = {"type": "any"}
        case _:
            body |= {"input": text, "max_output_tokens": tokens}
            if wish == "schema":
                body["text"] = {"format": {"type": "json_schema", **named}}
            if wish == "tool":
                body |= {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    if wish == "free" and api != "responses" and chance.random() < 0.5:
        body["stop_sequences" if api == "messages" else "stop"] = chance.sample(WORDS, 2)
    paths = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
    return Asked(
        paths.get(api, "/v1/completions"), body, schema if wish in ("schema", "tool") else None, pattern
    )


def whole_outputs(path: str, answer: dict[str, Any]) -> Iterator[str]:
    """The texts, or the arguments of calls, of the outputs that the answer says are whole."""
    if path == "/v1/messages":
        if answer["stop_reason"] in ("end_turn", "tool_use"):
            for block in answer["content"]:
                yield json.dumps(block["input"]) if block["type"] == "tool_use" else block["text"]
    elif path == "/v1/responses":
        if answer["status"] == "completed":
            for item in answer["output"]:
                if item["type"] == "function_call":
                    yield item["arguments"]
                elif item["type"] == "message":
                    yield "".join(part["text"] for part in item["content"])
    else:
        for choice in answer["choices"]:
            if choice["finish_reason"] not in ("stop", "tool_calls"):
                continue
            calls = choice.get("message", {}).get("tool_calls")
            if calls:
                yield from (call["function"]["arguments"] for call in calls)
            else:
                yield choice["message"]["content"] if "message" in choice else choice["text"]


def is_whole(asked: Asked, text: str) -> bool:
    """Whether the text satisfies the constraint of its request."""
    if asked.pattern:
        return re.fullmatch(asked.pattern, text) is not None
    if asked.schema is not None:
        try:
            jsonschema.validate(json.loads(text), asked.schema)
        except (ValueError, jsonschema.ValidationError):
            return False
    return True


class Soak:
    """The visitors, the control stream, and what they saw."""

    def __init__(self, port: int, seeds: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.silent_s = 0.0
        self.control_tokens = 0
        self._port = port
        self._stopping = threading.Event()
        visits = [threading.Thread(target=self._visit, args=(seeds + each,)) for each in range(VISITORS)]
        self._threads = [*visits, threading.Thread(target=self._control)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each request end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(REQUEST_S)
            assert not thread.is_alive(), "a request hangs"

    def _ask(
        self, path: str, body: dict[str, Any]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_S)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection, connection.getresponse()

    def _visit(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stopping.is_set():
            asked = random_request(chance)
            try:
                self._one(asked, chance)
            except Exception as error:  # noqa: BLE001 - told with the request, at the end
                self.wrong.append(f"{error!r}: {asked}")

    def _one(self, asked: Asked, chance: random.Random) -> None:
        connection, response = self._ask(asked.path, asked.body)
        try:
            if asked.body["stream"] and chance.random() < 0.3:
                response.read(chance.randrange(1, 2000))
                self.ends["aborted"] += 1
                return
            content = response.read()
        finally:
            connection.close()
        if response.status not in FINE:
            self.wrong.append(f"{response.status} {content[:300]!r}: {asked}")
        elif response.status != 200:
            self.ends[str(response.status)] += 1
        elif asked.body["stream"]:
            ended = re.search(
                rb'"(?:finish_reason|stop_reason)": ?"|"response.(?:completed|incomplete)"|"error"', content
            )
            self.ends["streamed"] += 1
            if ended is None:
                self.wrong.append(f"a stream without an end {content[-300:]!r}: {asked}")
        else:
            self.ends["read"] += 1
            for text in whole_outputs(asked.path, json.loads(content)):
                self.ends["whole"] += 1
                if not is_whole(asked, text):
                    self.wrong.append(f"said whole {text!r}: {asked}")

    def _control(self) -> None:
        body = {"model": "tools", "prompt": "Once", "max_tokens": 400, "stream": True, "temperature": 1.0}
        while not self._stopping.is_set():
            connection, response = self._ask("/v1/completions", body)
            last_s = 0.0
            while line := response.readline():
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    self.silent_s = max(self.silent_s, now_s - last_s) if last_s else self.silent_s
                    last_s = now_s
                    self.control_tokens += 1
            connection.close()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 400)
def test_four_apis_under_random_constraints(tmp_path: Path) -> None:
    """Flat memory in both processes, no restart, no silent stream, and whatever is said to be whole is whole."""
    with WorkerProcess(None, model=str(tool_directory(tmp_path)), prompt_cache_bytes=16 << 20) as worker:
        worker.wait_ready()
        pid, log = worker.engine_pid(), tmp_path / "http.log"
        command = [
            sys.executable,
            "-m",
            "zmqengine.cli.main",
            "http",
            "--worker",
            worker.address,
            "--port",
            "0",
        ]
        with log.open("wb") as file, subprocess.Popen(command, stderr=file) as front:
            try:
                wait_until(
                    lambda: '"ready"' in log.read_text() and '"listening"' in log.read_text(), "no front-end"
                )
                (port,) = set(re.findall(r'"url": ?"http://127.0.0.1:(\d+)"', log.read_text()))
                at_rest: list[tuple[int, int]] = []
                for half in range(2):
                    soak = Soak(int(port), seeds=half * VISITORS)
                    try:
                        for _ in range(SAMPLES // 2):
                            soak.silent_s = 0.0
                            threading.Event().wait(SECONDS / SAMPLES)
                            print(
                                f"worker {rss(pid) >> 20} MiB, front-end {rss(front.pid) >> 20} MiB, silence "
                                f"{soak.silent_s * 1000:.0f} ms, control {soak.control_tokens}, {dict(soak.ends)}",
                                flush=True,
                            )
                            assert soak.wrong == []
                            assert soak.silent_s < SILENT_S_MAX
                    finally:
                        soak.stop()
                    threading.Event().wait(IDLE_S)
                    at_rest.append((rss(pid), rss(front.pid)))
                    assert soak.wrong == []
                    assert min(soak.ends[end] for end in ("whole", "aborted", "streamed")) > 0
            finally:
                front.terminate()
        print(f"at rest, (worker, front-end): {[(a >> 20, b >> 20) for a, b in at_rest]} MiB")
        assert worker.engine_pid() == pid
        for before, after in zip(*at_rest, strict=True):
            assert after - before < GROWN_BYTES_MAX


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(psutil.Process(pid).memory_info().rss)
