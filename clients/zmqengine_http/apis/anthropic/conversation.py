"""Translates a Messages request to a `Chat`: messages and tools as chat templates read them, and its
options."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from zmqengine.sampling_params import SamplingOptions
from zmqengine_client.text.chats.history import history_arguments
from zmqengine_http.apis.anthropic.blocks import BlockTexts
from zmqengine_http.apis.anthropic.deferred_tools import DeferredTools
from zmqengine_http.apis.anthropic.request import (
    AnthropicMessage,
    Block,
    CountRequest,
    MessagesRequest,
    ToolChoice,
)
from zmqengine_http.apis.unread import newest_question
from zmqengine_http.generating.chat import Chat, ThinkingTokens
from zmqengine_http.generating.generation import GenerationOptions
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.prompt.template import thinking_keyword
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model

_SERVER_SIDE = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction")
"""Block types of servers that run tools themselves; so is every `..._tool_result` other than
`tool_result`."""
_EFFORTS = {"max": "high", "xhigh": "high"}


def to_chat(model: Model, request: CountRequest) -> Chat:
    """The chat of a Messages request.

    Raises a 400 for an image in the newest message that the model cannot see, unless tools are offered.
    """
    choice = request.tool_choice
    deferred = DeferredTools(request)
    pictures = Pictures(model)
    messages = template_messages(request, deferred, pictures)
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise bad_field("messages", "the last one calls tools, and their results are missing")
    return Chat(
        id=f"msg_{secrets.token_hex(16)}",
        model=model,
        messages=messages,
        pictures=pictures.all,
        tools=deferred.offered,
        deferred=frozenset(deferred.loaded),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        effort=_effort(model, request),
        thinking=_thinking(request),
        options=_generation_options(request),
        continues=continues,
        # Claude Code reads the refusal, and asks for less from then on.
        cut_max_tokens=False,
    )


# --- messages ----------------------------------------------------------------------------------------------


def template_messages(
    request: CountRequest, deferred: DeferredTools, pictures: Pictures | None = None
) -> list[dict[str, object]]:
    """The messages as chat templates read them, with the definitions of `deferred` tools that they load.

    Raises a 400 that names a block that is not text, if it stands in the user's newest message and no tool is offered.
    """
    plain: list[dict[str, object]] = []
    texts = BlockTexts(deferred, pictures)
    if request.system:
        plain.append({"role": "system", "content": texts.joined(request.system, "system", "\n\n")})
    newest = newest_question([_role(message) for message in request.messages], tools=bool(request.tools))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if message.role == "system" or isinstance(message.content, str):
            plain.append({"role": message.role, "content": texts.joined(message.content, where, "\n")})
        elif message.role == "user":
            plain += _user(message.content, where, texts, strict=index == newest)
        else:
            plain.append(_assistant(message.content, where, texts))
    return plain


def _role(message: AnthropicMessage) -> str:
    """The message's role; `tool` for a user message with tool results."""
    if isinstance(message.content, list) and any(block.type == "tool_result" for block in message.content):
        return "tool"
    return message.role


def _user(blocks: Sequence[Block], where: str, texts: BlockTexts, *, strict: bool) -> list[dict[str, object]]:
    """Tool results first, as the API demands and templates expect, then the user's text."""
    plain: list[dict[str, object]] = []
    said: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "tool_result":
            result = texts.result(block, at)
            plain.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result})
        elif not _is_server_side(block):
            said.append(texts.text(block, at, strict=strict))
    if said or not plain:
        plain.append({"role": "user", "content": "\n".join(said)})
    return plain


def _assistant(blocks: Sequence[Block], where: str, texts: BlockTexts) -> dict[str, object]:
    said: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, object]] = []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{where}[{index}]"))
        elif block.type != "redacted_thinking" and not _is_server_side(block):
            said.append(texts.text(block, f"{where}[{index}]"))
    plain: dict[str, object] = {"role": "assistant", "content": "".join(said)}
    if any(reasoning):
        plain["reasoning_content"] = "".join(reasoning)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _call(block: Block, where: str) -> dict[str, object]:
    if not block.name:
        raise bad_field(f"{where}.name", "a tool_use block names its tool")
    if not isinstance(block.input, dict | str | None):
        raise bad_field(f"{where}.input", "the input of a tool_use block is an object")
    return {
        "id": block.id or "",
        "type": "function",
        "function": {"name": block.name, "arguments": history_arguments(block.input)},
    }


def _is_server_side(block: Block) -> bool:
    kind = block.type
    return kind in _SERVER_SIDE or (kind.endswith("_tool_result") and kind != "tool_result")


# --- options -----------------------------------------------------------------------------------------------


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, object]:
    """The tool choice in the form of chat completions, which `make_constraint` validates."""
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _response_format(request: CountRequest) -> dict[str, object]:
    """The JSON schema of the output, from `output_config` or the older `output_format`."""
    wanted_format = (request.output_config and request.output_config.format) or request.output_format
    if not wanted_format:
        return {}
    if wanted_format.get("type") != "json_schema":
        return dict(wanted_format)
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": wanted_format.get("schema"), "strict": True},
    }


def _effort(model: Model, request: CountRequest) -> str | None:
    """The reasoning effort. This API's default is no reasoning, as far as the model's template can turn it
    off."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        template = model.tokenizer.chat_template or ""
        if thinking_keyword(model) in template:
            return "none"
        return "low" if "reasoning_effort" in template else None
    wanted = request.output_config.effort if request.output_config else None
    if not wanted and "reasoning_effort" not in model.tokenizer.template_variables:
        # Some templates let the model reason only where they are told so.
        return "medium"
    return _EFFORTS.get(wanted, wanted) if wanted else None


def _thinking(request: CountRequest) -> ThinkingTokens | None:
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled" or thinking.budget_tokens is None:
        return None
    return ThinkingTokens(thinking.budget_tokens, "thinking.budget_tokens")


def _generation_options(request: CountRequest) -> GenerationOptions:
    """Sampling and stop options; the defaults if the request only counts tokens."""
    if not isinstance(request, MessagesRequest):
        return GenerationOptions()
    metadata = request.metadata
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    sampling = cast(SamplingOptions, {name: value for name, value in given.items() if value is not None})
    return GenerationOptions(
        sampling=sampling,
        max_tokens=request.max_tokens,
        # Some clients send white space for no stop sequence.
        stop=[stop for stop in request.stop_sequences if stop.strip()],
        cache_key=metadata.user_id if metadata else None,
        cache_scope=request.cache_scope,
        pin=request.pin,
        prefill_keep=request.prefill_keep,
    )
