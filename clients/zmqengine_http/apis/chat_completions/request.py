"""The body of POST /v1/chat/completions, and its messages and tools as chat templates read them.

Nulls inside messages are dropped first: client libraries send every optional key of a message back as null.
Unknown keys inside messages and tools are ignored: keys that another server put into its response come back
with the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from zmqengine.protocol.messages import LogprobCount, MaxTokens, TokenIndex
from zmqengine_client.text.chats.history import history_arguments
from zmqengine_http.apis.openai_api.freeform import FREEFORM, freeform_description
from zmqengine_http.apis.openai_api.generation_request import (
    GENERATION_FIELDS,
    GenerationRequest,
    check_generation,
)
from zmqengine_http.apis.openai_api.interfaces import CHAT_SYNONYMS, translate_chat_fields
from zmqengine_http.apis.unread import newest_question, refusal, unread_text
from zmqengine_http.generating.constraints import check_constraints
from zmqengine_http.prompt.pictures import Pictures
from zmqengine_http.serving.body import Body, refused, without_nulls
from zmqengine_http.serving.errors import bad_field

# --- messages and tools ------------------------------------------------------------------------------------


class MessagePart(Struct, frozen=True):
    """A part of a message's content, of any type; only the fields of its type are set."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: object = None
    image_url: object = None
    image: object = None


Parts = Annotated[list[MessagePart], Meta(min_length=1)]
Content = str | Parts


class CalledFunction(Struct, frozen=True):
    """Name and JSON arguments of a call; some clients send an object instead of a string, or nothing."""

    name: str
    arguments: str | dict[str, object] | None = None


class CalledCustom(Struct, frozen=True):
    """Name and text of a call of a custom tool."""

    name: str
    input: str = ""


class ChatToolCall(Struct, frozen=True):
    """A tool call of an earlier assistant message: of a function, or of a custom tool."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str = ""
    type: Literal["function", "custom"] = "function"
    index: int | UnsetType = UNSET


class _Message(Struct, frozen=True, tag_field="role"):
    """One message of a chat."""


class SystemMessage(_Message, frozen=True, tag="system"):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """Instructions; `system` for chat templates that do not know this role."""

    content: Content
    name: str | None = None


class UserMessage(_Message, frozen=True, tag="user"):
    """A message of the user."""

    content: Content
    name: str | None = None


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """A message or tool calls of the model. `reasoning_content` goes to chat templates that read it.

    `reasoning` is another server's name for `reasoning_content`.
    """

    content: Content | None = None
    tool_calls: list[ChatToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[object] | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """The result of a tool call; programs send none, or an empty list, where it has no text."""

    content: Content = ""
    tool_call_id: str = ""
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Prediction(Struct, frozen=True):
    """Text that the output may resemble, such as a file before an edit; its tokens are verified as draft
    tokens."""

    content: Content
    type: Literal["content"]


class FunctionDefinition(Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class CustomDefinition(Struct, frozen=True):
    """A tool that takes one text; `format` may hold a grammar, which the prompt describes."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    format: object = None


class ToolDefinition(Struct, frozen=True):
    """A tool that the model may call: a function, or a custom tool."""

    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None
    type: Literal["function", "custom"] = "function"


# --- the body ----------------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=1024)] = field(default_factory=list)
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, object] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking_max: TokenIndex | None = None
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    prediction: Prediction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def continues(self) -> bool:
        """Whether the output continues the last message: an assistant's, unless the request says otherwise."""
        last = self.messages[-1]
        open_ = isinstance(last, AssistantMessage) and not last.tool_calls
        return open_ and self.continue_final_message is not False and self.add_generation_prompt is not True


def _prepare(body: dict[str, object]) -> None:
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_without_blanks(message) for message in messages]


def _without_blanks(message: object) -> object:
    message = without_nulls(message)
    if isinstance(message, dict) and message.get("role") == "tool" and message.get("content") == []:
        return {**message, "content": ""}
    return message


def _check(request: ChatRequest) -> None:
    check_generation(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_field("max_tokens", "max_completion_tokens is given too, with another value")
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    if request.continue_final_message and not request.continues:
        raise bad_field(
            "continue_final_message",
            "needs an assistant's message without calls at the end, and add_generation_prompt to be false",
        )
    if request.add_generation_prompt is False and not request.continues:
        raise bad_field(
            "add_generation_prompt", "false needs an assistant's message at the end, to be continued"
        )
    check_types(request.messages, request.tools)
    check_constraints(chat_tool_choice(request).choice, request.response_format)


def check_types(messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition]) -> None:
    """Check that every tool and call has what its type names. Raises a 400 for one that has not."""
    for index, tool in enumerate(tools):
        if getattr(tool, tool.type) is None:
            raise bad_field(f"tools[{index}].{tool.type}", f"a tool of type {tool.type} has one")
    for index, message in enumerate(messages):
        for number, call in enumerate((isinstance(message, AssistantMessage) and message.tool_calls) or ()):
            if getattr(call, call.type) is None:
                at = f"messages[{index}].tool_calls[{number}].{call.type}"
                raise bad_field(at, f"a call of type {call.type} has one")


CHAT_BODY = Body(
    ChatRequest,
    (
        *GENERATION_FIELDS,
        refused("functions", "use tools", []),
        refused("function_call", "use tool_choice", "none", "auto"),
        refused("modalities", "text only", ["text"]),
        refused("audio", "text only"),
        refused("web_search_options"),
        refused("moderation"),
    ),
    synonyms=CHAT_SYNONYMS,
    translate=translate_chat_fields,
    prepare=_prepare,
    check=_check,
)

# --- as chat templates read it -----------------------------------------------------------------------------


def chat_template_messages(
    messages: Sequence[ChatMessage], pictures: Pictures | None = None, *, tools: bool = False
) -> list[dict[str, object]]:
    """The messages with text content and the arguments of calls as objects; images become marks of `pictures`.

    Raises a 400 that names a part that is not text, if it stands in the user's newest message and the request offers
    no `tools`.
    """
    newest = newest_question([_role(message) for message in messages], tools=tools)
    return [
        _template_message(message, f"messages[{index}]", pictures or Pictures(), strict=index == newest)
        for index, message in enumerate(messages)
    ]


def chat_template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, object]]:
    """The tools as plain dictionaries; a custom tool as a function with one text."""
    return [_template_tool(tool) for tool in tools]


def _template_tool(tool: ToolDefinition) -> dict[str, object]:
    if tool.custom is None:
        # As sent: templates write out every member that is there.
        return {"type": "function", "function": without_nulls(msgspec.to_builtins(tool.function))}
    function: dict[str, object] = {"name": tool.custom.name}
    description = freeform_description(tool.custom.description, tool.custom.format)
    if description:
        function["description"] = description
    function["parameters"] = FREEFORM
    return {"type": "function", "function": function}


class OfferedTools(NamedTuple):
    """The tools that may be called, and the choice among them in the form that `make_constraint` takes."""

    tools: Sequence[ToolDefinition]
    choice: str | dict[str, object]


def chat_tool_choice(request: ChatRequest) -> OfferedTools:
    """The tools and the choice; `allowed_tools` narrows the tools. Raises a 400 for one that names none."""
    choice = request.tool_choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("auto", "none", "required", "any"):
        return OfferedTools(request.tools, str(kind))
    if isinstance(choice, dict) and kind in ("function", "tool") and isinstance(choice.get("name"), str):
        # As in the Responses API and in Messages.
        return OfferedTools(request.tools, {"type": "function", "function": {"name": choice["name"]}})
    if kind == "custom" and isinstance(choice, dict):
        return OfferedTools(request.tools, {"type": "function", "function": choice.get("custom")})
    if kind != "allowed_tools" or not isinstance(choice, dict):
        return OfferedTools(request.tools, choice)
    allowed = choice.get("allowed_tools")
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise bad_field("tool_choice.allowed_tools", "has a mode, auto or required, and a list of tools")
    named = [each.get(each.get("type", "function")) for each in listed if isinstance(each, dict)]
    names = {each.get("name") for each in named if isinstance(each, dict)}
    tools = [tool for tool in request.tools if tool_name(tool) in names]
    if names - {tool_name(tool) for tool in tools}:
        raise bad_field("tool_choice.allowed_tools", "names a tool that is not among the tools")
    return OfferedTools(tools, str(mode))


def tool_name(tool: ToolDefinition) -> str:
    """The name of a tool of either type."""
    definition = tool.function or tool.custom
    return definition.name if definition else ""


def content_text(
    content: Content | None, where: str, pictures: Pictures | None = None, *, strict: bool = False
) -> str:
    """The text of a content, its parts concatenated.

    A part that is not text becomes a note, or with `strict` a 400 that names it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        _part_text(part, f"{where}.content[{index}]", pictures or Pictures(), strict=strict)
        for index, part in enumerate(content)
    )


def _part_text(part: MessagePart, where: str, pictures: Pictures, *, strict: bool) -> str:
    if part.type in ("text", "refusal"):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_field(f"{where}.{part.type}", f"a part of type {part.type} has one")
        return text
    if part.type in ("image_url", "image") and pictures.sees:
        image = part.image_url if part.type == "image_url" else part.image
        return pictures.add(image.get("url") if isinstance(image, dict) else image, f"{where}.{part.type}")
    if strict:
        raise refusal(part.type, where, pictures)
    name = part.file.get("filename") if isinstance(part.file, dict) else None
    return unread_text(part.type, name if isinstance(name, str) else None)


def _role(message: ChatMessage) -> str:
    return str(message.__struct_config__.tag)


def _template_message(
    message: ChatMessage, where: str, pictures: Pictures, *, strict: bool
) -> dict[str, object]:
    plain: dict[str, object] = {
        "role": _role(message),
        "content": content_text(message.content, where, pictures, strict=strict),
    }
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        plain |= _answer_fields(message)
    return plain


def _answer_fields(message: AssistantMessage) -> dict[str, object]:
    plain: dict[str, object] = {}
    if message.refusal is not None:
        plain["refusal"] = message.refusal
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call)} for call in message.tool_calls
        ]
    return plain


def _called(call: ChatToolCall) -> dict[str, object]:
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    assert call.function is not None
    return {"name": call.function.name, "arguments": history_arguments(call.function.arguments)}
