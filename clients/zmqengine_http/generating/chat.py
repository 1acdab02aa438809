"""The API-neutral chat that every chat API is translated to, and its response."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from zmqengine.protocol.messages import ThinkingMax
from zmqengine_client.text.reasoning import thinking_max
from zmqengine_client.text.tool_calls import TextSplitter, make_splitter
from zmqengine_http.answers.answer_events import AnswerWriter
from zmqengine_http.endpoint import Service
from zmqengine_http.generating.constraints import OutputRules, check_constraints, make_constraint
from zmqengine_http.generating.generation import Generation, GenerationOptions, answer_generation
from zmqengine_http.prompt.pictures import Picture, fetched
from zmqengine_http.prompt.prompts import Prompt, encode_chat, is_short
from zmqengine_http.prompt.template import reasoning_variables, takes_tools
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.stable_head import RememberingWriter, StableHeadResult
from zmqengine_http.workers.worker import Model

_SESSION_HEADERS = (
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"x-session-id",
)
"""Headers in which agents name their session. Its requests go to one worker, which has the prompt in its
prefix cache."""


PREFILL_CHARS = 1024
"""Characters of a prefill that a splitter reads at once; it is made for pieces of the size of tokens."""


class ThinkingTokens(NamedTuple):
    """The most tokens of reasoning, and the request's field that says so."""

    tokens: int
    param: str


class Chat(Struct, frozen=True, kw_only=True):
    """A chat request as chat templates read it.

    Each message has a `role` and text `content`, with marks for its `pictures`; arguments of `tool_calls` are
    objects where the client's JSON parses. `tools` are `{"type": "function", "function": {...}}`. `tool_choice` and
    `response_format` are in the form of OpenAI's chat completions. `effort` is a reasoning effort; None leaves it to
    the template. `thinking` bounds the tokens of the reasoning. `variables` are further template variables. `deferred`
    names tools that stand in the messages instead of the head of the prompt. `continues`: the output continues the last
    message, which is the assistant's.
    """

    id: str
    model: Model
    messages: Sequence[dict[str, object]]
    pictures: Sequence[Picture] = ()
    tools: Sequence[dict[str, object]] = ()
    deferred: frozenset[str] = frozenset()
    tool_choice: str | Mapping[str, object] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None
    thinking: ThinkingTokens | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    continues: bool = False
    prompt_param: str = "messages"
    cut_max_tokens: bool = True

    @property
    def offered_tools(self) -> Sequence[dict[str, object]]:
        """The tools that the model may call."""
        return self.tools if self.tool_choice != "none" else ()

    @property
    def head_tools(self) -> Sequence[dict[str, object]]:
        """The offered tools that are rendered in the head of the prompt."""
        return [tool for tool in self.offered_tools if function_name(tool) not in self.deferred]


def function_name(tool: Mapping[str, object]) -> str:
    """The name of a tool in OpenAI's form."""
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


async def answer_chat(
    service: Service,
    exchange: Exchange,
    chat: Chat,
    make_writer: Callable[[Generation], AnswerWriter],
    *,
    stream: bool,
) -> None:
    """Render, generate and respond. Raises errors that become refusals."""
    check_constraints(chat.tool_choice, chat.response_format)
    _check_continued(chat)
    chat = without_unread_tools(exchange, chat)
    prompt = await render(service, exchange, chat)
    rules = OutputRules(
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        response_format=chat.response_format,
        explicit=chat.options.constraint,
        every_call=service.config.constrain_calls == "always",
    )
    constraint, unenforced = await service.tokenizing.run(
        exchange.id,
        exchange.body_bytes,
        functools.partial(make_constraint, chat.model, prompt, rules),
    )
    exchange.note_unenforced(unenforced)
    cache_key = chat.options.cache_key or _session(exchange)
    thinking = _thinking_max(exchange, chat, prompt)
    generation = Generation(
        id=chat.id,
        model=chat.model,
        prompts=[prompt],
        prompt_param=chat.prompt_param,
        options=msgspec.structs.replace(
            chat.options, cache_key=cache_key, constraint=constraint, thinking_max=thinking
        ),
        splitter=functools.partial(_splitter, chat, _schemas(chat)),
        first_call_only=not chat.parallel_tool_calls,
        cut_max_tokens=chat.cut_max_tokens,
    )
    writer = make_writer(generation)
    if service.head.enabled and chat.tools:
        writer = RememberingWriter(writer, service.head.memory)
    await answer_generation(service, exchange, generation, writer, stream=stream)


def without_unread_tools(exchange: Exchange, chat: Chat) -> Chat:
    """The chat without its tools where the template renders none and no call is forced; they are named as ignored.

    User interfaces offer their own tools to every model. A forced call is refused when the chat is rendered.
    """
    forced = chat.tool_choice not in ("auto", "none")
    if not chat.offered_tools or forced or takes_tools(chat.model):
        return chat
    exchange.note_ignored(["tools"], 0)
    return msgspec.structs.replace(chat, tools=(), deferred=frozenset())


async def render(service: Service, exchange: Exchange, chat: Chat) -> Prompt:
    """The prompt of a chat, after its head was normalized by `StableHead`."""
    chat = without_unread_tools(exchange, chat)
    variables = {**chat.variables, **_reasoning(exchange, chat)}

    pictures: Sequence[Picture] = await fetched(_at_most(chat), service.fetching)
    pictures = await service.tokenizing.images(exchange.id, chat.model, pictures)

    def work() -> tuple[Prompt, StableHeadResult]:
        head = service.head.normalize(chat.messages, chat.head_tools)
        prompt = encode_chat(chat.model, head.messages, head.tools, variables, chat.continues, pictures)
        return prompt, head

    if chat.pictures:
        prompt, head = await service.tokenizing.image_work(work)
    elif is_short(exchange.body_bytes):
        head = service.head.normalize(chat.messages, chat.head_tools)
        prompt = await service.tokenizing.short_chat(
            chat.model, head.messages, head.tools, variables, chat.continues
        )
    else:
        prompt, head = await service.tokenizing.run(
            exchange.id, exchange.body_bytes, work, lambda done: len(done[0].tokens)
        )
    for name, count in head.changes.facts().items():
        exchange.facts[f"head_{name}"] = count
        service.meter.head_changed(name, count)
    return prompt


def _at_most(chat: Chat) -> Sequence[Picture]:
    """The images of a chat. Raises a 400 for more than the worker takes, before any is fetched or decoded."""
    count, most = len(chat.pictures), chat.model.limits.images_max
    if count > most:
        raise bad_field(chat.prompt_param, f"images: {count}, the worker takes {most} in one request")
    return chat.pictures


def _reasoning(exchange: Exchange, chat: Chat) -> dict[str, object]:
    variables = reasoning_variables(chat.model, chat.effort)
    if variables is None:
        # A hint, not a requirement: agents send an effort with every request, whatever the model.
        exchange.facts["effort_ignored"] = True
        variables = {}
    if chat.thinking is not None and "thinking_budget" in chat.model.tokenizer.template_variables:
        # Seed-OSS is told how long it may reason.
        variables = {"thinking_budget": chat.thinking.tokens, **variables}
    return variables


def _thinking_max(exchange: Exchange, chat: Chat, prompt: Prompt) -> ThinkingMax | None:
    """The bound on the reasoning behind a prompt. For a model without reasoning, the field is named as ignored."""
    if chat.thinking is None:
        return None
    tokens, param = chat.thinking
    calls = bool(chat.offered_tools)
    bound = thinking_max(
        chat.model.tokenizer, tokens, prompt.tokens, opened=prompt.reasoning_open, calls=calls
    )
    if bound is None:
        exchange.note_ignored([param], 0)
    elif not chat.model.limits.thinking_max:
        raise bad_field(param, "this worker cannot bound the reasoning", code="unsupported_value")
    return bound


def _schemas(chat: Chat) -> dict[str, Mapping[str, object]]:
    """The parameters of the offered functions by name, which all choices share."""
    schemas: dict[str, Mapping[str, object]] = {}
    for tool in chat.offered_tools:
        function = tool["function"]
        assert isinstance(function, dict)
        schemas[function_name(tool)] = function.get("parameters") or {}
    return schemas


def _splitter(chat: Chat, schemas: Mapping[str, Mapping[str, object]], prompt: Prompt) -> TextSplitter | None:
    splitter = make_splitter(chat.model.markers, reasoning_open=prompt.reasoning_open, tools=schemas)
    if splitter is not None and prompt.prefill:
        for start in range(0, len(prompt.prefill), PREFILL_CHARS):
            splitter.feed(prompt.prefill[start : start + PREFILL_CHARS])
    return splitter


def _check_continued(chat: Chat) -> None:
    """Raise a 400 for a constraint on an output whose beginning is given."""
    forced = chat.tool_choice not in ("auto", "none")
    if chat.continues and (
        forced or chat.response_format.get("type", "text") != "text" or chat.options.constraint
    ):
        raise bad_field(
            chat.prompt_param,
            "the last message is the assistant's, to be continued, and a format or a tool is demanded of the whole "
            "answer: leave out one of them",
            code="unsupported_value",
        )


def _session(exchange: Exchange) -> str | None:
    return next((value for name in _SESSION_HEADERS if (value := exchange.header(name))), None)
