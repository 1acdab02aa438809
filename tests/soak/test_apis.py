"""Random constraints, tools, stop strings, log-probabilities, aborts, and requests of bug reports and attacks over all
HTTP APIs, against one worker.

For $ZMQENGINE_SOAK_SECONDS, twenty if it is not set; by hand it is run with 3600. Silence is processor time between two
tokens of a free stream: of the threads that make them in a stream of the worker's, of the front-end's event loop in one
that takes the four chat APIs in turn (a late front-end sends several tokens at once, and does not say how many).
ZMQENGINE_SOAK_HANG_S bounds a request and a silence on the clock, which depend on what else the machine does.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import psutil
import pytest

from tests.http.tool_directory import tool_directory
from tests.soak.strange_requests import APIS, TEMPLATE, Strange, strange_request
from tests.support.hostile_constraints import HOSTILE, OVER_A_LIMIT_PATTERN
from tests.support.listener import PROMPT, SILENT_MS_MAX, Listener, Makers, Silence, longest, native_chunks
from tests.support.workers import WorkerProcess, wait_until

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("ZMQENGINE_SOAK_SECONDS", "20"))
VISITORS = 8
SAMPLES = 5
"""Lines that are printed between two rests."""
PERIOD_S = min(150.0, SECONDS / 2)
"""Seconds until the requests that run are ended, for memory at rest. The last quarter of the rests is held against the
one before it."""
IDLE_S = 7.0
"""An idle worker gives memory back after five seconds."""
PREFILL_MS = 10.0
"""A pass may read prompts for up to 2.5 times as long; by default for as long as a stream may be silent here."""
# A short run fills the prefix cache of 16 MiB and the traces of steps. Two rests of one state differ by up to 3 MiB; a
# worker that freed no traces grew by 8 from one quarter of an hour to the next.
GROWN_BYTES_MAX = (24 if SECONDS < 1200 else 6) << 20
HANG_S = float(os.environ.get("ZMQENGINE_SOAK_HANG_S", "120"))
WORDS = ("home", "happy", "little", "garden", "the sun")
PATTERNS = (
    "(dog|cat|boy|girl) .{0,60}(home|happy)",
    "[A-Z][a-z]{2,9}",
    "[0-9]{2,4}-[a-z]+",
    OVER_A_LIMIT_PATTERN,
)
REGEXES = ("[0-9]{4}", "(yes|no|perhaps)( [a-z]{1,8}){0,6}", *PATTERNS)
ENDS = ("whole", "aborted", "streamed")
LINE_BYTES_MAX = 8192
"""Of a line of the log: no request fills it."""
KEYS = ("one of the keys", "another of the keys")


class Asked(NamedTuple):
    """A request: its path and body, and what a whole output of it has to satisfy, if anything."""

    path: str
    body: dict[str, Any]
    schema: Any = None
    pattern: str = ""

    fine: tuple[int, ...] = (200, 400, 422)
    """Statuses that are right: of a constraint that is too complex, or of an output over a limit of it, too."""


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A strict schema of any kind; objects at the root."""
    kind = (
        "object"
        if not depth
        else chance.choice(
            ("string", "text", "pattern", "integer", "enum", "array", "object", "either", "chain")
        )
    )
    match kind:
        case "object" if depth < 3:
            names = chance.sample(("name", "age", "city", "kind", "note", "items"), chance.randint(1, 4))
            members = {name: random_schema(chance, depth + 1) for name in names}
            schema = {
                "type": "object",
                "properties": members,
                "required": names,
                "additionalProperties": False,
            }
            return schema if depth else schema | {"$defs": {"chain": CHAIN}}
        case "array" if depth < 3:
            return {
                "type": "array",
                "items": random_schema(chance, depth + 1),
                "maxItems": chance.randint(0, 4),
            }
        case "either" if depth < 3:
            return {"anyOf": [{"type": "null"}, random_schema(chance, depth + 1), {"enum": ["a", "b"]}]}
        case "chain":
            return {"$ref": "#/$defs/chain", "description": "a documented reference"}
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


CHAIN: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}
WITHOUT = {
    "completions": {"tool"},
    "messages": {"regex", "hostile"},
    "responses": {"regex", "hostile"},
    "ollama": {"regex", "hostile", "tool"},
}
"""Wishes that an API has no field for, or, Ollama's tools, that it does not hold to a schema."""


def random_request(chance: random.Random) -> Asked:
    """Any API, with a schema, a tool, a regular expression, a hostile constraint or nothing, and any other wishes."""
    api = chance.choice(list(PATHS))
    wishes = {"schema", "tool", "regex", "hostile", "free"} - WITHOUT.get(api, set())
    wish = chance.choice(sorted(wishes))
    tokens, text = chance.choice((20, 120, 300)), f"Tell me about {chance.choice(WORDS)}."
    body: dict[str, Any] = {"model": "tools", "stream": chance.random() < 0.5}
    drawing = {"temperature": chance.choice((0, 0.7, 1.0))}
    schema, pattern = random_schema(chance), ""
    named = {"name": "answer", "strict": True, "schema": schema}
    function = {"name": "act", "strict": True, "parameters": schema}
    message = {"messages": [{"role": "user", "content": text}]}
    stops = chance.sample(WORDS, 2) if wish == "free" and chance.random() < 0.5 else []
    if wish == "regex":
        body["guided_regex"] = pattern = chance.choice(REGEXES)
    if wish == "hostile":
        kind, constraint, choices = chance.choice([*HOSTILE.values()])
        body[f"guided_{GUIDED[kind]}"] = choices or constraint
    match api:
        case "chat":
            body |= message | drawing | {"max_tokens": tokens, "seed": chance.randrange(9)}
            if wish == "schema":
                body["response_format"] = {"type": "json_schema", "json_schema": named}
            if wish == "tool":
                body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
                body["parallel_tool_calls"] = False
            if chance.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        case "completions":
            body |= drawing | {"prompt": text, "max_tokens": tokens, "n": chance.choice((1, 1, 3))}
            if wish == "schema":
                body["guided_json"] = schema
            if chance.random() < 0.3:
                body["logprobs"] = chance.randint(0, 5)
        case "messages":
            body |= message | drawing | {"max_tokens": tokens}
            if wish == "schema":
                body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
            if wish == "tool":
                body["tools"] = [{"name": "act", "strict": True, "input_schema": schema}]
                body["tool_choice"] = {"type": "any"}
        case "ollama":
            body |= message | {"options": drawing | {"num_predict": tokens, "stop": stops}}
            if wish == "schema":
                body["format"] = schema
        case _:
            # Stored responses would grow to their bound of 32 MiB.
            body |= drawing | {"input": text, "max_output_tokens": tokens, "store": False}
            if wish == "schema":
                body["text"] = {"format": {"type": "json_schema", **named}}
            if wish == "tool":
                body |= {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    if stops and api in ("chat", "completions", "messages"):
        body["stop_sequences" if api == "messages" else "stop"] = stops
    return Asked(PATHS[api], body, schema if wish in ("schema", "tool") else None, pattern)


GUIDED = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}


def joined(path: str, stream: bytes) -> dict[str, Any]:
    """The answer that the events of a stream make, in the shape of one that is not streamed."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n")]
    events: list[Any] = [json.loads(line) for line in lines if line.startswith("{")]
    pieces: dict[tuple[int, Any], str] = defaultdict(str)
    ends: dict[int, str | None] = {0: None}
    if path == "/v1/responses":
        found = [event["response"] for event in events if event["type"] == "response.completed"]
        return dict(found[0]) if found else {"status": "incomplete"}
    for event in events:
        if path == "/v1/messages":
            if event["type"] == "content_block_delta":
                kind = "input" if event["delta"]["type"] == "input_json_delta" else "text"
                pieces[event["index"], kind] += event["delta"].get("partial_json") or event["delta"].get(
                    "text", ""
                )
            elif event["type"] == "message_delta":
                ends[0] = event["delta"]["stop_reason"]
        elif path == "/api/chat":
            pieces[0, "text"] += event.get("message", {}).get("content", "")
            ends[0] = event.get("done_reason")
        else:
            for choice in event.get("choices", ()):
                index, delta = choice["index"], choice.get("delta", choice)
                pieces[index, "text"] += delta.get("content") or delta.get("text") or ""
                for call in delta.get("tool_calls") or ():
                    pieces[index, call["index"]] += call["function"].get("arguments") or ""
                ends[index] = choice["finish_reason"] or ends.get(index)
    if path == "/v1/messages":
        content = [
            {"type": "tool_use", "input": json.loads(text or "{}")}
            if kind == "input" and ends[0] == "tool_use"
            else {"type": "text", "text": text}
            for (_, kind), text in sorted(pieces.items())
        ]
        return {"stop_reason": ends[0], "content": content}
    if path == "/api/chat":
        return {"done_reason": ends[0], "message": {"content": pieces[0, "text"]}}
    choices = []
    for index, end in ends.items():
        calls = [text for (which, kind), text in pieces.items() if which == index and kind != "text"]
        functions = [{"function": {"arguments": text}} for text in calls]
        choices.append({"finish_reason": end, "text": pieces[index, "text"], "message": {
            "content": pieces[index, "text"], "tool_calls": functions}})  # fmt: skip
    return {"choices": choices}


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
    elif path == "/api/chat":
        if answer["done_reason"] == "stop":
            yield answer["message"]["content"]
    else:
        for choice in answer["choices"]:
            if choice["finish_reason"] not in ("stop", "tool_calls"):
                continue
            calls = choice.get("message", {}).get("tool_calls")
            if calls:
                yield from (call["function"]["arguments"] for call in calls)
            else:
                yield choice["message"]["content"] if "message" in choice else choice["text"]


def arguments_of(answer: dict[str, Any]) -> list[Any]:
    """The arguments of the calls in a chat completion."""
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [json.loads(call["function"]["arguments"]) for call in calls]


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


def headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {key}"}


TEXT_EVENT = re.compile(rb'"text_delta"|"response.output_text.delta"|"content": ?"[^"]')


def chunks_over_http(port: int) -> Callable[[], Iterator[list[bytes]]]:
    """What a listener of free streams reads: of each of the APIs in turn, the events that come together."""
    turns = itertools.cycle(APIS)

    def chunks() -> Iterator[list[bytes]]:
        api, text = next(turns), "Tell me a long story."
        body: dict[str, Any] = {"model": "tools", "stream": True}
        match api:
            case "responses":
                body |= {"input": text, "max_output_tokens": 400, "store": False}
            case "ollama":
                body |= {"messages": [{"role": "user", "content": text}], "options": {"num_predict": 400}}
            case _:
                body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 400}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        connection.request("POST", APIS[api], json.dumps(body), headers(KEYS[0]))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while data := response.read1():
            yield TEXT_EVENT.findall(data)
        connection.close()

    return chunks


class Soak:
    """The visitors, the control stream, and what they saw."""

    def __init__(self, port: int, seeds: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._port = port
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._visit, args=(seeds + each,)) for each in range(VISITORS)
        ]
        for thread in self._threads:
            thread.start()

    def has_seen_all(self) -> bool:
        """Whether a request of each kind has ended."""
        return all(self.ends[end] for end in ENDS)

    def stop(self) -> None:
        """Let each request end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a request hangs"

    def _ask(
        self, path: str, body: dict[str, Any], chance: random.Random
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANG_S)
        connection.request("POST", path, json.dumps(body), headers(chance.choice(KEYS)))
        return connection, connection.getresponse()

    def _visit(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stopping.is_set():
            asked = random_request(chance) if chance.random() < 0.5 else strange_request(chance)
            try:
                self._one(asked, chance)
            except Exception as error:  # noqa: BLE001 - told with the request, at the end
                self.wrong.append(f"{error!r}: {asked}")

    def _one(self, asked: Asked | Strange, chance: random.Random) -> None:
        streamed = asked.body.get("stream", False)
        connection, response = self._ask(asked.path, asked.body, chance)
        try:
            if streamed and chance.random() < 0.3:
                response.read(chance.randrange(1, 2000))
                self.ends["aborted"] += 1
                return
            content = response.read()
        finally:
            connection.close()
        if response.status in (503, 529) and b"no answer" in content:
            # The worker had no turn for ten seconds: the machine's fault if the listener had none either.
            self.ends["unanswered"] += 1
        elif response.status not in asked.fine:
            self.wrong.append(f"{response.status} {content[:300]!r}: {str(asked)[:3000]}")
        elif response.status != 200:
            self.ends[str(response.status)] += 1
        else:
            self.ends["streamed" if streamed else "read"] += 1
            if streamed and END.search(content) is None:
                self.wrong.append(f"a stream without an end {content[-300:]!r}: {asked}")
            answer = joined(asked.path, content) if streamed else json.loads(content)
            if isinstance(asked, Strange):
                self.ends["strange"] += 1
                if asked.calls is not None and arguments_of(answer) != [*asked.calls]:
                    self.wrong.append(f"other calls {answer}: {asked}")
                return
            for text in whole_outputs(asked.path, answer):
                self.ends["whole"] += 1
                if not is_whole(asked, text):
                    self.wrong.append(f"said whole {text!r}: {asked}")


END = re.compile(
    rb'"(?:finish_reason|stop_reason|done_reason)": ?"|"response.(?:completed|incomplete)"|"error"'
)


@contextlib.contextmanager
def front_end(worker: str, log: Path) -> Iterator[tuple[int, int]]:
    """The process and the port of a front-end with keys."""
    command = [sys.executable, "-m", "zmqengine.cli.main", "http", "--worker", worker, "--port", "0"]
    environment = {**os.environ, "ZMQENGINE_HTTP_API_KEYS": ",".join(KEYS)}
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=environment) as front:
        try:
            wait_until(
                lambda: '"ready"' in log.read_text() and '"listening"' in log.read_text(), "no front-end"
            )
            (port,) = set(re.findall(r'"url": ?"http://127.0.0.1:(\d+)"', log.read_text()))
            yield front.pid, int(port)
        finally:
            front.terminate()


class Rest(NamedTuple):
    """What was seen until the requests of a period had ended: resident bytes, mistakes, long silences."""

    rss: tuple[int, ...]
    wrong: Sequence[str]
    long: Sequence[Silence]
    not_measured: int
    unanswered: int


def period(listen: Callable[[], dict[str, Listener]], soak: Soak, pids: Sequence[int]) -> Rest:
    """Visitors for a while, beside streams that are listened to; then memory at rest."""
    listeners = listen()
    heard = dict.fromkeys(listeners, 0)
    try:
        for _ in range(SAMPLES):
            threading.Event().wait(PERIOD_S / SAMPLES)
            print(*(f"{rss(pid) >> 20} MiB" for pid in pids), dict(soak.ends), flush=True)
            for name, listener in listeners.items():
                new = listener.silences[heard[name] :]
                heard[name] += len(new)
                print(
                    f"  {name}: {len(new)} silences, the longest {longest(new) if new else None}", flush=True
                )
        wait_until(soak.has_seen_all, "no request of a kind has ended", seconds=HANG_S)
    finally:
        soak.stop()
        for listener in listeners.values():
            listener.stop()
    threading.Event().wait(IDLE_S)
    for name, listener in listeners.items():
        long = [each for each in listener.silences if each.is_long]
        print(
            f"{time.strftime('%T')} {name}: {len(long)} of {len(listener.silences)} silences above "
            f"{SILENT_MS_MAX:.0f} ms, {listener.held_up} not measured; {len(listener.outputs)} streams {long}"
        )
    print("at rest:", *(f"{rss(pid) / 2**20:.1f} MiB" for pid in pids), *soak.wrong, sep="\n", flush=True)
    return Rest(
        tuple(map(rss, pids)),
        soak.wrong,
        [each for listener in listeners.values() for each in listener.silences if each.is_long],
        sum(listener.held_up for listener in listeners.values()),
        soak.ends["unanswered"],
    )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 4 * HANG_S)
def test_all_apis_under_random_constraints(tmp_path: Path) -> None:
    """Flat memory in both processes, no restart, no silent stream, and whatever is said to be whole is whole."""
    directory, log = tool_directory(tmp_path, TEMPLATE), tmp_path / "http.log"
    with WorkerProcess(
        None, model=str(directory), prompt_cache_bytes=16 << 20, prefill_ms=PREFILL_MS
    ) as worker:
        worker.wait_ready()
        pid = worker.engine_pid()
        with front_end(worker.address, log) as (front_pid, port), worker.client() as native:
            over_http = chunks_over_http(port)
            native.generate_tokens(PROMPT, max_tokens=5).read()
            maker = Makers(pid)
            for _ in APIS:
                assert list(over_http())
            loop = Makers.event_loop(front_pid)

            def listen() -> dict[str, Listener]:
                return {
                    "worker": Listener(native_chunks(native), maker),
                    "HTTP": Listener(over_http, loop),
                }

            rests: list[Rest] = []
            until_s = time.monotonic() + SECONDS
            while len(rests) < 2 or time.monotonic() < until_s:
                soak = Soak(port, seeds=len(rests) * VISITORS)
                rests.append(period(listen, soak, (pid, front_pid)))
        assert worker.engine_pid() == pid
        lines = log.read_bytes().splitlines()
    assert [wrong for rest in rests for wrong in rest.wrong] == []
    # One may be page faults or time that the host took: both count as processor time.
    assert max(len(rest.long) for rest in rests) <= 1, [rest.long for rest in rests]
    assert all(rest.unanswered <= rest.not_measured for rest in rests)
    assert max(map(len, lines)) <= LINE_BYTES_MAX
    quarter = max(1, len(rests) // 4)
    for process in zip(*(rest.rss for rest in rests), strict=True):
        before, after = process[-2 * quarter : -quarter], process[-quarter:]
        assert statistics.median(after) - statistics.median(before) < GROWN_BYTES_MAX


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(psutil.Process(pid).memory_info().rss)
