"""A chat in no API's words: what all APIs for chats are translated to, and how it becomes an answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct, field

from zmqengine_http.answers.answer_events import AnswerWriter
from zmqengine_http.generating.constraints import Wishes, check_constraints, make_constraint
from zmqengine_http.generating.generation import Generation, answer_generation
from zmqengine_http.generating.generation_options import GenerationOptions
from zmqengine_http.prompt.prompts import Conversation, Prompt, encode_chat, is_short
from zmqengine_http.prompt.reasoning import reasoning_variables
from zmqengine_http.service import Service
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.stable_head import HeadChanges, RememberingWriter
from zmqengine_http.tool_calls import TextSplitter, make_splitter
from zmqengine_http.workers.worker import Model

_SESSION_HEADERS = (
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"x-session-id",
)
"""What agents name their session in: its requests belong to one worker, where its prompt is cached."""


class Chat(Struct, frozen=True, kw_only=True):
    """Messages, tools and wishes.

    Messages and tools are as in `Conversation`; `tool_choice` and `response_format` as in chat completions. `effort` is
    a word for how much to reason, None for what the template does by itself.
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


async def answer_chat(
    service: Service,
    exchange: Exchange,
    chat: Chat,
    make_writer: Callable[[Generation], AnswerWriter],
    *,
    stream: bool,
) -> None:
    """Render, generate, and let the writer tell it. Raises what becomes a refusal."""
    check_constraints(chat.tool_choice, chat.response_format)
    prompt = await render(service, exchange, chat)
    cache_key = chat.options.cache_key or _session(exchange)
    wishes = Wishes(
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        response_format=chat.response_format,
        asked=chat.options.constraint,
        every_call=service.config.constrain_calls == "always",
    )
    held = make_constraint(chat.model, prompt, wishes)
    exchange.note_unenforced(held.unenforced)
    generation = Generation(
        id=chat.id,
        model=chat.model,
        prompts=[prompt],
        prompt_param=chat.prompt_param,
        options=msgspec.structs.replace(chat.options, cache_key=cache_key, constraint=held.constraint),
        splitter=functools.partial(_splitter, chat),
        first_call_only=not chat.parallel_tool_calls,
        cut_max_tokens=chat.cut_max_tokens,
    )
    writer = make_writer(generation)
    if service.head.enabled and chat.tools:
        writer = RememberingWriter(writer, service.head.memory)
    await answer_generation(service, exchange, generation, writer, stream=stream)


async def render(service: Service, exchange: Exchange, chat: Chat) -> Prompt:
    """The prompt of a chat, its head made stable."""
    tools = chat.tools if chat.tool_choice != "none" else ()
    variables = {**chat.variables, **_reasoning(exchange, chat)}

    def stable() -> tuple[Conversation, HeadChanges]:
        made = service.head.stabilise(chat.messages, tools)
        return Conversation(made.messages, made.tools, variables), made.changes

    def work() -> tuple[Prompt, HeadChanges]:
        conversation, changes = stable()
        return encode_chat(chat.model, conversation), changes

    if is_short(exchange.body_bytes):
        conversation, changes = stable()
        prompt = await service.tokenizing.short_chat(chat.model, conversation)
    else:
        prompt, changes = await service.tokenizing.run(
            exchange.id, exchange.body_bytes, work, lambda done: len(done[0].tokens)
        )
    for name, count in changes.facts().items():
        exchange.facts[f"head_{name}"] = count
        service.meter.head_changed(name, count)
    return prompt


def _reasoning(exchange: Exchange, chat: Chat) -> dict[str, object]:
    variables = reasoning_variables(chat.model, chat.effort)
    if variables is None:
        # A wish, not a promise: agents send it with every request, whatever the model.
        exchange.facts["effort_ignored"] = chat.effort
        return {}
    return variables


def _splitter(chat: Chat, prompt: Prompt) -> TextSplitter | None:
    schemas: dict[str, Mapping[str, object]] = {}
    for tool in chat.tools if chat.tool_choice != "none" else ():
        function = tool["function"]
        assert isinstance(function, dict)
        schemas[str(function["name"])] = function.get("parameters") or {}
    return make_splitter(chat.model.markers, reasoning_open=prompt.reasoning_open, tools=schemas)


def _session(exchange: Exchange) -> str | None:
    return next((value for name in _SESSION_HEADERS if (value := exchange.header(name))), None)
