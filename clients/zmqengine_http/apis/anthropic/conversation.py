"""Translates a Messages request to a `Chat`: messages and tools as chat templates read them, and its
options."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from zmqengine.sampling_params import SamplingOptions
from zmqengine_http.apis.anthropic.request import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    Content,
    CountRequest,
    MessagesRequest,
    ToolChoice,
)
from zmqengine_http.generating.chat import Chat
from zmqengine_http.generating.generation import GenerationOptions
from zmqengine_http.prompt.template import thinking_keyword
from zmqengine_http.serving.errors import ApiError, bad_field
from zmqengine_http.workers.worker import Model

_SERVER_SIDE = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction")
"""Block types of servers that run tools themselves; so is every `..._tool_result` other than
`tool_result`."""
_EFFORTS = {"max": "high", "xhigh": "high"}


def to_chat(model: Model, request: CountRequest) -> Chat:
    """The chat of a Messages request. Raises a 400 for content that a text model cannot read."""
    choice = request.tool_choice
    return Chat(
        id=f"msg_{secrets.token_hex(16)}",
        model=model,
        messages=template_messages(request),
        tools=template_tools(request.tools),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        effort=_effort(model, request),
        options=_generation_options(request),
        # Claude Code reads the refusal, and asks for less from then on.
        cut_max_tokens=False,
    )


# --- messages and tools ------------------------------------------------------------------------------------


def template_messages(request: CountRequest) -> list[dict[str, object]]:
    """The messages as chat templates read them. Raises a 400 that names a block that is not text."""
    plain: list[dict[str, object]] = []
    if request.system:
        plain.append({"role": "system", "content": _joined(request.system, "system", "\n\n")})
    for place, message in enumerate(request.messages):
        plain += _READERS[message.role](message, f"messages[{place}].content")
    return plain


def template_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, object]]:
    """The client's own tools in OpenAI's form, which chat templates read; server-side tools are left out."""
    plain: list[dict[str, object]] = []
    for tool in tools:
        if tool.type not in (None, "custom"):
            continue
        function: dict[str, object] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        if tool.strict:
            function["strict"] = True
        plain.append({"type": "function", "function": function})
    return plain


def _user(message: AnthropicMessage, where: str) -> list[dict[str, object]]:
    """Tool results first, as the API demands and templates expect, then the user's text."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results: list[dict[str, object]] = []
    texts: list[str] = []
    for place, block in enumerate(message.content):
        at = f"{where}[{place}]"
        if block.type == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block, at)}
            )
        elif not _is_server_side(block):
            texts.append(_text(block, at))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(message: AnthropicMessage, where: str) -> list[dict[str, object]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, object]] = []
    for place, block in enumerate(message.content):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{where}[{place}]"))
        elif block.type != "redacted_thinking" and not _is_server_side(block):
            texts.append(_text(block, f"{where}[{place}]"))
    plain: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        plain["reasoning_content"] = "".join(reasoning)
    if calls:
        plain["tool_calls"] = calls
    return [plain]


def _system(message: AnthropicMessage, where: str) -> list[dict[str, object]]:
    return [{"role": "system", "content": _joined(message.content, where, "\n")}]


_READERS: dict[str, Callable[[AnthropicMessage, str], list[dict[str, object]]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _call(block: Block, where: str) -> dict[str, object]:
    if not block.name:
        raise bad_field(f"{where}.name", "a tool_use block names its tool")
    if not isinstance(block.input, dict):
        raise bad_field(f"{where}.input", "the input of a tool_use block is an object")
    return {
        "id": block.id or "",
        "type": "function",
        "function": {"name": block.name, "arguments": block.input},
    }


def _result(block: Block, where: str) -> str:
    try:
        content = msgspec.convert(block.content or "", Content)
    except msgspec.ValidationError:
        raise bad_field(f"{where}.content", "a tool_result holds a text or a list of blocks") from None
    text = _joined(content, f"{where}.content", "\n")
    return f"Error: {text}" if block.is_error else text


def _joined(content: Content, where: str, separator: str) -> str:
    if isinstance(content, str):
        return content
    return separator.join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: Block, where: str) -> str:
    """The text of a block. Raises a 400 for a block without text."""
    if block.type == "text":
        if block.text is None:
            raise bad_field(f"{where}.text", "a text block has a text")
        return block.text
    if block.type == "tool_reference":
        return str(block.name or "")
    source = block.source
    if block.type == "document" and isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data", ""))
    raise ApiError(
        400,
        f"{where}: this model reads text only, it cannot take a block of type {block.type[:40]!r}",
        param=where,
        code="unsupported_value",
    )


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
    given = (request.output_config and request.output_config.format) or request.output_format
    if not given:
        return {}
    if given.get("type") != "json_schema":
        return dict(given)
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": given.get("schema"), "strict": True},
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
    return _EFFORTS.get(wanted, wanted) if wanted else None


def _generation_options(request: CountRequest) -> GenerationOptions:
    """Sampling and stop options; the defaults if the request only counts tokens."""
    if not isinstance(request, MessagesRequest):
        return GenerationOptions()
    metadata = request.metadata
    sampling = SamplingOptions(
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
    )
    if request.temperature is not None:
        sampling["temperature"] = request.temperature
    return GenerationOptions(
        sampling=sampling,
        max_tokens=request.max_tokens,
        # Some clients send white space for no stop sequence.
        stop=[stop for stop in request.stop_sequences if stop.strip()],
        cache_key=metadata.user_id if metadata else None,
        cache_scope=request.cache_scope,
        pin=request.pin,
    )
