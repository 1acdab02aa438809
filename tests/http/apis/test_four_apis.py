"""One table for the four APIs: the defaults, the bounds and the refusals of each field, and the ends of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from tests.http.front import Reply, call, post
from tests.http.scripted import TOOLS_TEMPLATE, ScriptedFront, ScriptedStream
from zmqengine.sampling_params import Sampling
from zmqengine_client.core.chunks import Completion
from zmqengine_client.text.stop_strings import StopAutomaton
from zmqengine_http.generating import generation
from zmqengine_http.workers.pool import Pool

FACTS: dict[str, str | bool | int] = {
    "default_temperature": "0.6", "default_top_p": "0.95", "default_top_k": "20",
    "tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>",
}  # fmt: skip
CACHED = 3
"""Cached tokens of each prompt, as `ScriptedStream` tells them."""
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


class Api(NamedTuple):
    """An API: the body of its smallest request, its names of shared fields, and its words for an end."""

    path: str
    smallest: Callable[[str], dict[str, Any]]
    names: Mapping[str, str] = {}
    without: frozenset[str] = frozenset()
    temperature_max: float = 2.0
    top_k_min: int = -1
    whole: str = "stop"
    cut: str = "length"
    called: str = "tool_calls"

    def body(self, text: str = "Hi", /, **fields: Any) -> dict[str, Any]:
        """A request with shared fields under the API's own names."""
        return self.smallest(text) | {self.names.get(name, name): value for name, value in fields.items()}

    def tools(self) -> dict[str, Any]:
        """The fields of a request that may call `f`."""
        if self.path == "/v1/messages":
            return {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}
        if self.path == "/v1/responses":
            return {"tools": [{"type": "function", **TOOL}]}
        return {"tools": [{"type": "function", "function": TOOL}]}


def _of_user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


_OPENAI = frozenset(
    {"seed", "n", "min_p", "stop", "logit_bias", "priority", "repetition_penalty", "min_tokens"}
)
APIS = {
    "chat": Api("/v1/chat/completions", _of_user),
    "completions": Api("/v1/completions", lambda text: {"prompt": text, "max_tokens": 100}),
    "responses": Api(
        "/v1/responses", lambda text: {"input": text}, {"max_tokens": "max_output_tokens"}, _OPENAI | {"top_k"},
        whole="completed", cut="incomplete", called="completed",
    ),
    "messages": Api(
        "/v1/messages", lambda text: {**_of_user(text), "model": "scripted", "max_tokens": 100},
        {"stop": "stop_sequences"}, _OPENAI - {"stop"}, temperature_max=1.0, top_k_min=0,
        whole="end_turn", cut="max_tokens", called="tool_use",
    ),
}  # fmt: skip
every_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


class Model(ScriptedFront):
    """A front-end on a model with sampling defaults of its own, for every API."""

    def __init__(self, template: str = TOOLS_TEMPLATE, **config: Any) -> None:
        super().__init__(template, facts=FACTS, **config)

    def ask(self, api: Api, body: dict[str, Any]) -> Reply:
        return post(self.front, api.path, body)

    def options(self, api: Api, **fields: Any) -> dict[str, Any]:
        """The options with which an accepted request reached the worker."""
        reply = self.ask(api, api.body(**fields))
        assert reply.status == 200, reply.body
        return self.client.options[-1]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model() as model:
        yield model


@pytest.fixture(autouse=True)
def _says_yes(model: Model) -> None:
    model.text = "yes"


# --- defaults ----------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    # The model's own.
    "temperature": 0.6, "top_p": 0.95, "top_k": 20,
    # SPEC's.
    "stop_token_ids": [], "ignore_eos": False, "logprobs": None, "seed": None, "priority": 0,
    "deadline_ms": None, "cache_scope": None, "cache_salt": "", "pin": False, "constraint": None, "prediction": [],
    "prefill_keep": None,
}  # fmt: skip
GIVEN = {
    "temperature": (0.0, 0.0), "top_p": (1.0, 1.0), "top_k": (0, 0), "max_tokens": (7, 7), "seed": (5, 5),
    "min_p": (0.5, 0.5), "priority": (3, 3), "repetition_penalty": (1.5, 1.5), "pin": (True, True),
    "cache_scope": ("key", "key"), "prefill_keep": (0.5, 0.5),
}  # fmt: skip
"""The value of each field that is sent, and the one that reaches the worker."""


@every_api
def test_what_a_request_leaves_out_is_the_models_own_or_specs(api: Api, model: Model) -> None:
    """generation_config.json decides in every API, or an agent samples from the whole tail."""
    options = model.options(api)
    assert {name: options[name] for name in DEFAULTS} == DEFAULTS
    for name in Sampling.__struct_fields__:
        assert options.get(name, getattr(Sampling(), name)) == DEFAULTS.get(name, getattr(Sampling(), name))


@every_api
@pytest.mark.parametrize("field", GIVEN)
def test_a_field_that_is_given_changes_itself_alone(api: Api, field: str, model: Model) -> None:
    """Also to a value that is falsy, and to null, which is the same as leaving it out."""
    if field in api.without:
        pytest.skip("no field of this API")
    sent, expected = GIVEN[field]
    options = model.options(api, **{field: sent})
    assert options[field] == expected
    others = DEFAULTS.keys() - {field}
    assert {name: options[name] for name in others} == {name: DEFAULTS[name] for name in others}
    if field in ("temperature", "top_p", "top_k"):
        assert model.options(api, **{field: None})[field] == DEFAULTS[field]


@every_api
def test_the_operators_temperature_wins_over_the_models(api: Api) -> None:
    """And the request's over both."""
    with Model(default_temperature=0.2) as model:
        assert model.options(api)["temperature"] == 0.2
        assert model.options(api, temperature=0.0)["temperature"] == 0.0


OLLAMA = {
    "chat": ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    "generate": ("/api/generate", {"prompt": "Hi"}),
    "raw": ("/api/generate", {"prompt": "Hi", "raw": True}),
}
every_ollama = pytest.mark.parametrize(("path", "body"), OLLAMA.values(), ids=OLLAMA)


@every_ollama
def test_ollamas_defaults_are_the_models_own_too(path: str, body: dict[str, Any], model: Model) -> None:
    """Its fields stand in `options`, and null is the same as leaving one out."""

    def options(**given: Any) -> dict[str, Any]:
        reply = post(model.front, path, body | {"model": "scripted", "stream": False, "options": given})
        assert reply.status == 200, reply.body
        return {name: model.client.options[-1].get(name) for name in DEFAULTS}

    assert options() == DEFAULTS
    assert options(temperature=None, top_p=None, top_k=None) == DEFAULTS
    for field in ("temperature", "top_p", "top_k", "seed"):
        sent, expected = GIVEN[field]
        assert options(**{field: sent}) == DEFAULTS | {field: expected}


@every_ollama
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("temperature", -1), ("top_p", 2), ("top_k", 0.5), ("num_predict", "x"), ("num_predict", -5),
        ("repeat_penalty", 0), ("repeat_penalty", "much"), ("stop", ["a"] * 17), ("seed", 2**63),
    ],
)  # fmt: skip
def test_ollamas_options_have_the_same_bounds(
    path: str, body: dict[str, Any], field: str, wrong: Any, model: Model
) -> None:
    """A 400 in Ollama's shape that names the field by the word that was sent."""
    reply = post(model.front, path, body | {"model": "scripted", "options": {field: wrong}})
    assert reply.status == 400
    assert reply.json["error"].startswith(field)


@every_ollama
def test_what_an_operator_ends_is_an_error_for_ollama(
    path: str, body: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 503, or a line with `error` in a stream that says nothing of an end."""
    monkeypatch.setattr(
        ScriptedStream, "result", property(lambda self: Completion("abort", self._sent, 3, 0, 0, "r"))
    )
    reply = post(model.front, path, body | {"model": "scripted", "stream": False})
    assert reply.status == 503
    assert "operator" in reply.json["error"]
    stream = post(model.front, path, body | {"model": "scripted"})
    assert stream.status == 200
    assert "operator" in json.loads(stream.body.splitlines()[-1])["error"]
    assert b"done_reason" not in stream.body


# --- bounds and refusals -----------------------------------------------------------------------------------

BOUNDS = {
    "temperature": lambda api: ([0, api.temperature_max], [-0.1, api.temperature_max + 0.1, "hot"]),
    "top_p": lambda api: ([0, 1], [-0.1, 1.1, "x"]),
    "top_k": lambda api: ([api.top_k_min, 0, 2**31 - 1], [api.top_k_min - 1, 2**31, 0.5]),
    "max_tokens": lambda api: ([1], [0, 2**63, "many"]),
    "stop": lambda api: ([["a"] * 16, ["a" * 1000]], [["a"] * 17, ["a" * 1001], [3]]),
    "n": lambda api: ([1, 128], [0, 129]),
    "seed": lambda api: ([-(2**63), 2**63 - 1], [2**63, "x"]),
    "pin": lambda api: ([True, False], ["yes", 1]),
    "prefill_keep": lambda api: ([0.01, 0.99], [0, 1, -0.5, "half"]),
    "stream": lambda api: ([False], ["yes"]),
    "cache_scope": lambda api: (["shared", "key", "session"], ["all", 1]),
    "min_p": lambda api: ([0, 1], [-0.1, 1.1]),
    "repetition_penalty": lambda api: ([0.5, 2], [0, -1]),
    "logit_bias": lambda api: ([{"5": 100}], [{"5": 101}, {"a": 1}, {"300": 1}]),
    "priority": lambda api: ([-100, 100], [-101, 101]),
    "min_tokens": lambda api: ([0, 100], [-1, 2**31]),
}  # fmt: skip


def refusal(reply: Reply) -> str:
    """The message of a 400, in the shape of its API."""
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


@every_api
@pytest.mark.parametrize("field", BOUNDS)
def test_the_bounds_of_a_field_are_kept_and_named(api: Api, field: str, model: Model) -> None:
    """The extremes are taken; one beyond is a 400 that names the field by the API's own name."""
    if field in api.without:
        pytest.skip("no field of this API")
    taken, refused = BOUNDS[field](api)
    for value in taken:
        assert model.ask(api, api.body(**{field: value})).status == 200, value
    for value in refused:
        reply = model.ask(api, api.body(**{field: value}))
        assert api.names.get(field, field) in refusal(reply), value


@every_api
def test_what_no_api_takes_is_refused_by_each(api: Api, model: Model) -> None:
    """No prompt, no JSON, an unknown model, a prompt beyond the context."""
    prompt = next(iter(api.smallest("")))
    wrong: tuple[Any, ...] = (3, {})
    for empty in wrong:
        assert prompt in refusal(model.ask(api, api.body() | {prompt: empty}))
    headers = {"content-type": "application/json"}
    for body in (b"{", b"[]", b"\xff", b'{"a":' * 3000):
        assert call(model.front, "POST", api.path, body, headers).status == 400
    assert model.ask(api, api.body() | {"model": "nobody"}).status == 404
    long = refusal(model.ask(api, api.body("a" * 5000)))
    assert "context length" in long or "too long" in long


@every_api
def test_nothing_that_a_client_nests_is_a_failure_of_ours(api: Api, model: Model) -> None:
    """Schemas of any depth are an answer or a 400."""
    if api.path == "/v1/completions":
        pytest.skip("no tools")
    for depth in (100, 300, 500, 900, 980):
        nested = '{"type":"array","items":' * depth + "{}" + "}" * depth
        tools = json.dumps(api.tools()).replace('"properties": {}', f'"properties": {{"a": {nested}}}')
        body = json.dumps(api.body())[:-1] + "," + tools[1:]
        reply = call(model.front, "POST", api.path, body.encode(), {"content-type": "application/json"})
        assert reply.status in (200, 400), reply.body


@every_api
def test_too_deep_for_us_is_a_refusal(api: Api, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python's recursion ends depends on its version; a client's nesting is the only way there."""

    def too_deep(*_: object) -> Any:
        raise RecursionError

    monkeypatch.setattr(Pool, "model", too_deep)
    assert "nested too deep" in refusal(model.ask(api, api.body()))


# --- tools that the template has no place for -----------------------------------------------------------------

NO_TOOLS_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
FORCED: Mapping[str, Sequence[Any]] = {
    "/v1/chat/completions": ["required", {"type": "function", "function": {"name": "f"}}],
    "/v1/responses": ["required", {"type": "function", "name": "f"}],
    "/v1/messages": [{"type": "any"}, {"type": "tool", "name": "f"}],
}
"""The choices of each API that force a call."""


@pytest.fixture(scope="module")
def without_tools() -> Iterator[Model]:
    with Model(template=NO_TOOLS_TEMPLATE) as model:
        yield model


@every_api
def test_tools_that_nobody_forces_are_left_out_where_no_template_reads_them(
    api: Api, without_tools: Model
) -> None:
    """Open WebUI offers its own tools to every model, and the answer was a 400; a forced call still is one."""
    if api.path not in FORCED:
        pytest.skip("no tools")
    for stream in (False, True):
        reply = without_tools.ask(api, api.body(**api.tools(), stream=stream))
        assert reply.status == 200, reply.body
        assert reply.headers["x-ignored-fields"] == "tools"
        assert without_tools.client.prompts[-1] == "user: Hi\n"
    for choice in FORCED[api.path]:
        message = refusal(without_tools.ask(api, api.body(**api.tools(), tool_choice=choice)))
        assert message == "tools: this model's chat template takes none"


@pytest.mark.parametrize("path", ["/api/chat", "/v1/messages/count_tokens", "/tokenize"])
def test_tools_are_left_out_by_what_stands_beside_the_four_apis(path: str, without_tools: Model) -> None:
    """Open WebUI asks Ollama's; a prompt is counted as it is answered."""
    api = APIS["messages" if path.startswith("/v1") else "chat"]
    body = {**_of_user("Hi"), "model": "scripted"}
    replies = [post(without_tools.front, path, body | more) for more in (api.tools(), {})]
    assert [reply.status for reply in replies] == [200, 200]
    assert [reply.headers.get("x-ignored-fields") for reply in replies] == ["tools", None]
    if path != "/api/chat":
        assert replies[0].body == replies[1].body


# --- ends --------------------------------------------------------------------------------------------------


def ended(api: Api, reply: Reply) -> str:
    """The API's word for the end of a whole answer."""
    assert reply.status == 200, reply.body
    body = reply.json
    return str(
        body["stop_reason"]
        if api.path == "/v1/messages"
        else body.get("status") or body["choices"][0]["finish_reason"]
    )


def streamed(api: Api, reply: Reply) -> str:
    """The API's word for the end of a streamed answer."""
    assert reply.status == 200, reply.body
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: {")]
    if api.path == "/v1/messages":
        return next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")
    if api.path == "/v1/responses":
        return str(events[-1]["response"]["status"])
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    return str(next(reason for reason in reasons if reason))


def ends(api: Api, model: Model, **fields: Any) -> str:
    """The end of an answer, which does not depend on whether it was streamed."""
    body = api.body() | fields
    whole, stream = ended(api, model.ask(api, body)), streamed(api, model.ask(api, {**body, "stream": True}))
    assert whole == stream
    return whole


CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
HALF_CALLS = {
    "cut": CALL[:45],
    "cut, after a whole one": CALL + CALL[:45],
    "malformed": CALL.replace('"b"', "b"),
    "malformed, after a whole one": CALL + CALL.replace('"b"', "b"),
}


@every_api
def test_a_whole_answer_and_a_cut_one_have_words_of_their_own(api: Api, model: Model) -> None:
    """An end token is whole, max_tokens is not."""
    assert ends(api, model) == api.whole
    assert ends(api, model, **{api.names.get("max_tokens", "max_tokens"): 1}) == api.cut


@every_api
@pytest.mark.parametrize("said", HALF_CALLS.values(), ids=HALF_CALLS)
def test_a_half_call_never_ends_as_a_whole_one(api: Api, said: str, model: Model) -> None:
    """Whether max_tokens cut it, the model's own end, a stop string, or its own mistake."""
    if api.path == "/v1/completions":
        pytest.skip("no tools")
    model.text = CALL
    assert ends(api, model, **api.tools()) == api.called
    model.text = said
    assert ends(api, model, **api.tools()) == api.cut
    (tokens,) = (len(model.client._tokenizer.encode(said, add_special_tokens=False)),)
    limit = {api.names.get("max_tokens", "max_tokens"): tokens}
    assert ends(api, model, **api.tools(), **limit) == api.cut
    if "stop" not in api.without:
        model.text = CALL + "x"
        stop = {api.names.get("stop", "stop"): ['b"']}
        word = "stop_sequence" if api.path == "/v1/messages" else api.cut
        assert ends(api, model, **api.tools(), **stop) == word


@every_api
def test_what_an_operator_ends_is_an_error(api: Api, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a whole answer nor one of the length that was asked: a 503 or its like, or an error event in a stream."""
    monkeypatch.setattr(
        ScriptedStream, "result", property(lambda self: Completion("abort", self._sent, 3, 0, 0, "r"))
    )
    reply = model.ask(api, api.body())
    assert reply.status == (529 if api.path == "/v1/messages" else 503)
    assert "operator" in reply.json["error"]["message"]
    stream = model.ask(api, api.body(stream=True))
    assert stream.status == 200
    assert b"operator" in stream.body
    assert not any(
        word in stream.body for word in (b'"finish_reason":"', b'"end_turn"', b"response.completed")
    )


@every_api
def test_stop_strings_are_built_once_for_all_choices(
    api: Api, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen of 1,000 characters for each of 128 choices took gigabytes."""
    built = 0

    class Counted(StopAutomaton):
        def __init__(self, stops: Sequence[str]) -> None:
            nonlocal built
            built += 1
            super().__init__(stops)

    monkeypatch.setattr(generation, "StopAutomaton", Counted)
    fields = {} if "n" in api.without else {"n": 20, "stop": ["x"]}
    assert model.ask(api, api.body() | fields).status == 200
    assert built == 1


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_long_prompts_of_many_choices_leave_turns_to_others(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice writes the whole prompt to a worker."""
    monkeypatch.setattr(generation, "WRITTEN_TOKENS", 1)
    generate, turns, seen = model.client.generate_tokens, 0, list[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1

    def spy(*prompt: Any, **options: Any) -> ScriptedStream:
        seen.append(turns)
        asyncio.get_running_loop().call_soon(turn)
        return generate(*prompt, **options)

    monkeypatch.setattr(model.client, "generate_tokens", spy)
    assert model.ask(APIS[name], APIS[name].body(n=5)).status == 200
    assert len(set(seen)) == 5


def test_more_tokens_than_the_context_are_not_decoded(model: Model) -> None:
    """A text of one context is; /detokenize had no bound."""
    assert post(model.front, "/detokenize", {"tokens": [65] * 4096}).json["prompt"]
    reply = post(model.front, "/detokenize", {"tokens": [65] * 4097})
    assert (reply.status, reply.error["param"]) == (400, "tokens")


# --- usage -------------------------------------------------------------------------------------------------


def cached(reply: Reply) -> tuple[int, int]:
    """The prompt's tokens and those that came from the cache, as the API counts them."""
    usage = reply.json["usage"]
    if "input_tokens" in usage and "cache_read_input_tokens" in usage:
        hit = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + hit, hit
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage.get("prompt_tokens", usage.get("input_tokens")), details["cached_tokens"]


@every_api
@pytest.mark.parametrize("choices", [1, 3])
def test_a_prompt_and_its_cached_tokens_count_once(api: Api, choices: int, model: Model) -> None:
    """However many choices it has; two prompts count twice."""
    if choices > 1 and "n" in api.without:
        pytest.skip("no field of this API")
    fields = {"n": choices} if choices > 1 else {}
    alone = cached(model.ask(api, api.body()))
    assert alone[1] == CACHED
    assert cached(model.ask(api, api.body(**fields))) == alone
    if api.path == "/v1/completions":
        two = cached(model.ask(api, api.body(**fields) | {"prompt": ["Hi", "Hi"]}))
        assert two == (2 * alone[0], 2 * CACHED)
