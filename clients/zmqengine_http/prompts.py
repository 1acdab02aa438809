"""From the texts of a request to token ids, on threads, so that the event loop never waits for a tokenizer.

Only a text so short that the hand-over would cost more, some 0.3 ms, is done at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from zmqengine_client.errors import ZmqEngineError
from zmqengine_http import logs
from zmqengine_http.errors import ApiError, bad_field
from zmqengine_http.messages import AssistantMessage, ChatMessage, RefusalPart, TextPart, ToolDefinition
from zmqengine_http.requests import ChatRequest
from zmqengine_http.worker import Model

SLOW_S = 1.0
SMALL_BYTES = 2048
"""What a body of this length holds is tokenised in about the time that handing it to a thread and back takes."""
TAIL_TOKENS = 32
RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""What a request has fields of its own for, or has no say in."""
T = TypeVar("T")


class ChatPrompt(msgspec.Struct, frozen=True):
    """The token ids of a chat, and whether the template ended with the marker that starts reasoning."""

    tokens: list[int]
    reasoning_open: bool = False


class Tokenizing:
    """A pool of threads for templates and tokenizers. What takes over a second is logged with the request's id.

    `size` is the length of the body that the text came in.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Let running work end in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, request_id: str, size: int, work: Callable[[], T], count: Callable[[T], int]) -> T:
        """The result of `work`, done on a thread unless it is small."""
        if size <= SMALL_BYTES:
            return work()
        started = time.monotonic()
        result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        seconds = time.monotonic() - started
        if seconds > SLOW_S:
            logs.warning("slow tokenizing", id=request_id, tokens=count(result), seconds=round(seconds, 3))
        return result

    async def text(self, request_id: str, size: int, model: Model, text: str) -> list[int]:
        """The token ids of a text."""
        return await self.run(request_id, size, lambda: model.tokenizer.encode(text), len)

    async def chat(self, request_id: str, size: int, model: Model, request: ChatRequest) -> ChatPrompt:
        """The token ids of a chat with its tools. Raises a 400 if the model's template cannot take it."""
        tools = request.tools if request.tool_choice != "none" else []
        variables = _template_variables(model, request)
        return await self.run(
            request_id,
            size,
            lambda: encode_chat(model, request.messages, tools, variables),
            lambda prompt: len(prompt.tokens),
        )


def encode_chat(
    model: Model,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDefinition],
    variables: dict[str, object],
) -> ChatPrompt:
    """The prompt of a chat. Raises a 400 that says what the template refused."""
    template = model.tokenizer.chat_template
    if not template:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    if tools and "tools" not in template:
        raise bad_field("tools", "this model's chat template takes none", code="unsupported_parameter")
    for name in variables:
        if not name.isidentifier() or name in RESERVED:
            raise bad_field("chat_template_kwargs", f"{name[:40]!r} cannot be set")
    plain = [_plain(message, knows_developer="developer" in template) for message in messages]
    definitions = [msgspec.to_builtins(tool) for tool in tools] or None
    try:
        tokens = model.tokenizer.encode_chat(plain, definitions, **variables)
    except ZmqEngineError as error:
        raise bad_field("messages", f"the chat template refuses this: {error}"[:500]) from None
    return ChatPrompt(tokens, _reasoning_open(model, tokens))


def _reasoning_open(model: Model, tokens: list[int]) -> bool:
    start, end = model.markers.think_start, model.markers.think_end
    if not start:
        return False
    tail = model.tokenizer.decode(tokens[-TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rfind(start) > tail.rfind(end)


def _plain(message: ChatMessage, *, knows_developer: bool) -> dict[str, object]:
    """A message as chat templates read it: text content, arguments as objects."""
    plain: dict[str, object] = {
        key: value
        for key, value in msgspec.to_builtins(message).items()
        if value is not None and key != "annotations"
    }
    plain["content"] = _text(message.content)
    if plain["role"] == "developer" and not knows_developer:
        plain["role"] = "system"
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _arguments(text: str) -> object:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _template_variables(model: Model, request: ChatRequest) -> dict[str, object]:
    variables = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        template = model.tokenizer.chat_template or ""
        if "reasoning_effort" in template:
            variables["reasoning_effort"] = request.reasoning_effort
        elif request.reasoning_effort == "none" and (keyword := _thinking_keyword(model)) in template:
            variables[keyword] = False
        else:
            raise ApiError(
                400, "reasoning_effort is not supported by this model's chat template",
                param="reasoning_effort", code="unsupported_parameter",
            )  # fmt: skip
    return variables


def _thinking_keyword(model: Model) -> str:
    return str(model.tokenizer.facts.get("thinking_keyword") or "enable_thinking")
