"""The bodies of requests as structs: one source for the validation and for the OpenAPI document.

Bounds here are OpenAI's where it states one and the worker's elsewhere. Message keys are strict as well, after nulls
are dropped: client libraries send every optional key of a message back as null.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from zmqengine.protocol.messages import LOGIT_BIAS_MAX, LOGPROBS_MAX, STOP_TOKEN_IDS_MAX, TOKEN_ID_MAX
from zmqengine_http import fields
from zmqengine_http.errors import ApiError, bad_field, from_validation

T = TypeVar("T")
STOP_MAX = 16
N_MAX = 128

TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOP_MAX)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class _Part(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a message's content."""


class TextPart(_Part, frozen=True, tag="text"):
    """Text."""

    text: str


class RefusalPart(_Part, frozen=True, tag="refusal"):
    """What an assistant said when it refused; read as text."""

    refusal: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an assistant made earlier in the chat."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role"):
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
    """What the user said."""

    content: Content
    name: str | None = None


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """What the model said or called. `reasoning_content` goes to chat templates that read it."""

    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[object] | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str = ""
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool the model may call."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage` adds a last chunk with the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both ways to generate have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=TOKEN_ID_MAX)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=LOGIT_BIAS_MAX)
    ] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] = []
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=N_MAX)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class ChatRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=1024)] = []
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, object] = {}
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] = {}


Prompt = (
    str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
)


class CompletionRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text or token ids. Raises a 400 for a list that mixes them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        others = [item for item in self.prompt if not isinstance(item, int)]
        if (ids and others) or len({type(item) for item in others}) > 1:
            raise bad_field("prompt", "a list holds strings, token ids or lists of token ids, not a mixture")
        return [ids] if ids else others


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ToolDefinition] = []
    chat_template_kwargs: dict[str, object] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def read_chat(data: bytes) -> ChatRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    body = fields.accept("chat", _object(data))
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_without_nulls(message) for message in messages]
    request = _convert(body, ChatRequest)
    _check_chat(request)
    return request


def read_completion(data: bytes) -> CompletionRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    request = _convert(fields.accept("completions", _object(data)), CompletionRequest)
    _check_common(request)
    return request


def read_tokenize(data: bytes) -> TokenizeRequest:
    """The request in a body, with either a prompt or messages. Raises a 400 that names the field at fault."""
    body = {name: value for name, value in _object(data).items() if value is not None}
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_without_nulls(message) for message in messages]
    request = _convert(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    return request


def read_detokenize(data: bytes) -> DetokenizeRequest:
    """The request in a body. Raises a 400 that names the field at fault."""
    return _convert({k: v for k, v in _object(data).items() if v is not None}, DetokenizeRequest)


def _object(data: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _convert(body: dict[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def _without_nulls(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _check_chat(request: ChatRequest) -> None:
    _check_common(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_field("max_tokens", "max_completion_tokens is given too, with another value")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    if request.tool_choice not in ("none", "auto"):
        raise bad_field(
            "tool_choice",
            "only none and auto are supported: there is no constrained output yet",
            code="unsupported_value",
        )
    kind = request.response_format.get("type", "text")
    if kind != "text" or request.response_format.keys() - {"type"}:
        raise bad_field(
            "response_format", 'only {"type": "text"} is supported: there is no constrained output yet',
            code="unsupported_value",
        )  # fmt: skip
    for place, tool in enumerate(request.tools):
        if tool.function.strict:
            raise bad_field(
                f"tools[{place}].function.strict",
                "there is no constrained output yet",
                code="unsupported_value",
            )


def _check_common(request: CommonRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "needs stream to be true")
    for key in request.logit_bias:
        if not key.isascii() or not key.isdigit() or int(key[:12]) > TOKEN_ID_MAX:
            raise bad_field("logit_bias", f"{key[:40]!r} is no token id")
