"""The API-neutral chat that every chat API is translated to, and its response."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct, field

from zmqengine_http.answers.answer_events import AnswerWriter
from zmqengine_http.endpoint import Service
from zmqengine_http.generating.constraints import OutputRules, check_constraints, make_constraint
from zmqengine_http.generating.generation import Generation, GenerationOptions, answer_generation
from zmqengine_http.prompt.prompts import Prompt, encode_chat, is_short
from zmqengine_http.prompt.template import reasoning_variables
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.stable_head import RememberingWriter, StableHeadResult
from zmqengine_http.tool_calls import TextSplitter, make_splitter
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


class Chat(Struct, frozen=True, kw_only=True):
    """A chat request as chat templates read it.

    Each message has a `role` and text `content`; arguments of `tool_calls` are objects where the client's
    JSON parses. `tools` are `{"type": "function", "function": {...}}`. `tool_choice` and `response_format`
    are in the form of OpenAI's chat completions. `effort` is a reasoning effort; None leaves it to the
    template. `variables` are further template variables.
    """

    id: str
    model: Model
    messages: Sequence[dict[str, object]]
    tools: Sequence[dict[str, object]] = ()
    tool_choice: str | Mapping[str, object] = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    prompt_param: str = "messages"
    cut_max_tokens: bool = True

    @property
    def offered_tools(self) -> Sequence[dict[str, object]]:
        """The tools that the model may call."""
        return self.tools if self.tool_choice != "none" else ()


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
    prompt = await render(service, exchange, chat)
    rules = OutputRules(
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        response_format=chat.response_format,
        explicit=chat.options.constraint,
        every_call=service.config.constrain_calls == "always",
    )
    constraint, unenforced = make_constraint(chat.model, prompt, rules)
    exchange.note_unenforced(unenforced)
    cache_key = chat.options.cache_key or _session(exchange)
    generation = Generation(
        id=chat.id,
        model=chat.model,
        prompts=[prompt],
        prompt_param=chat.prompt_param,
        options=msgspec.structs.replace(chat.options, cache_key=cache_key, constraint=constraint),
        splitter=functools.partial(_splitter, chat),
        first_call_only=not chat.parallel_tool_calls,
        cut_max_tokens=chat.cut_max_tokens,
    )
    writer = make_writer(generation)
    if service.head.enabled and chat.tools:
        writer = RememberingWriter(writer, service.head.memory)
    await answer_generation(service, exchange, generation, writer, stream=stream)


async def render(service: Service, exchange: Exchange, chat: Chat) -> Prompt:
    """The prompt of a chat, after its head was normalized by `StableHead`."""
    variables = {**chat.variables, **_reasoning(exchange, chat)}

    def normalize() -> StableHeadResult:
        return service.head.normalize(chat.messages, chat.offered_tools)

    def work() -> tuple[Prompt, StableHeadResult]:
        head = normalize()
        return encode_chat(chat.model, head.messages, head.tools, variables), head

    if is_short(exchange.body_bytes):
        head = normalize()
        prompt = await service.tokenizing.short_chat(chat.model, head.messages, head.tools, variables)
    else:
        prompt, head = await service.tokenizing.run(
            exchange.id, exchange.body_bytes, work, lambda done: len(done[0].tokens)
        )
    for name, count in head.changes.facts().items():
        exchange.facts[f"head_{name}"] = count
        service.meter.head_changed(name, count)
    return prompt


def _reasoning(exchange: Exchange, chat: Chat) -> dict[str, object]:
    variables = reasoning_variables(chat.model, chat.effort)
    if variables is None:
        # A hint, not a requirement: agents send an effort with every request, whatever the model.
        exchange.facts["effort_ignored"] = chat.effort
        return {}
    return variables


def _splitter(chat: Chat, prompt: Prompt) -> TextSplitter | None:
    schemas: dict[str, Mapping[str, object]] = {}
    for tool in chat.offered_tools:
        function = tool["function"]
        assert isinstance(function, dict)
        schemas[str(function["name"])] = function.get("parameters") or {}
    return make_splitter(chat.model.markers, reasoning_open=prompt.reasoning_open, tools=schemas)


def _session(exchange: Exchange) -> str | None:
    return next((value for name in _SESSION_HEADERS if (value := exchange.header(name))), None)
