"""The bodies of Ollama's endpoints, translated to those of OpenAI's.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md. Like Ollama, unknown fields and options are
ignored; unlike it, they are named in a header of the response. Known `options` are the fields of the same names in
OpenAI's requests.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from zmqengine_http.apis.openai_api.interfaces import ALL_THAT_FITS
from zmqengine_http.serving.body import Body, foreign, reported
from zmqengine_http.serving.errors import bad_field


class OllamaFunction(Struct, frozen=True):
    """Name and arguments of a call; some clients send them as a text."""

    name: str
    arguments: dict[str, object] | str | None = None


class OllamaCall(Struct, frozen=True):
    """A tool call of an earlier message; most clients send no id."""

    function: OllamaFunction
    id: str = ""


class OllamaMessage(Struct, frozen=True):
    """One message; images are beside the content."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[object] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(Struct, frozen=True, kw_only=True):
    """The fields of both generating endpoints. A stream is the default, as Ollama has it."""

    model: str
    stream: bool = True
    think: bool | str | int | None = None
    format: str | dict[str, object] | None = None
    options: dict[str, object] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """The body of POST /api/chat. Without messages it asks for the model to be loaded."""

    messages: list[OllamaMessage] = field(default_factory=list)
    tools: list[object] = field(default_factory=list)

    @property
    def only_loads(self) -> bool:
        """Whether it asks for the model alone."""
        return not self.messages


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """The body of POST /api/generate. Without a prompt it asks for the model to be loaded.

    `raw` and `suffix` continue the prompt as it is; otherwise it is the one message of a chat.
    """

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    images: list[object] = field(default_factory=list)
    raw: bool = False

    @property
    def only_loads(self) -> bool:
        """Whether it asks for the model alone."""
        return not self.prompt and not self.suffix


class OllamaModelRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /api/show and /api/pull; `name` is the older word."""

    model: str | None = None
    name: str | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Raises a 400 without one."""
        name = self.model or self.name
        if not name:
            raise bad_field("model", "name the model")
        return name


_BOTH = (reported("keep_alive", "the worker keeps its model loaded"),)
CHAT_BODY = Body(OllamaChatRequest, _BOTH, unknown_ignored=True)
GENERATE_BODY = Body(
    OllamaGenerateRequest,
    (
        *_BOTH,
        foreign("template", "the model's own template is used", ""),
        foreign("context", "send the conversation to /api/chat", []),
    ),
    unknown_ignored=True,
)
MODEL_BODY = Body(OllamaModelRequest, unknown_ignored=True)


def chat_fields(request: OllamaChatRequest) -> dict[str, object]:
    """The body of a chat completion that asks for the same."""
    ids = _CallIds()
    document = _common(request) | {"messages": [_message(each, ids) for each in request.messages]}
    if request.tools:
        document["tools"] = request.tools
    if request.think is not None:
        document["think"] = request.think
    if request.logprobs:
        document |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return document | _response_format(request.format)


def prompt_as_chat(request: OllamaGenerateRequest) -> OllamaChatRequest:
    """The chat of a prompt that goes through the model's template."""
    messages = [OllamaMessage("system", request.system)] if request.system else []
    messages.append(OllamaMessage("user", request.prompt, images=request.images))
    return OllamaChatRequest(
        model=request.model, stream=request.stream, think=request.think, format=request.format,
        options=request.options, logprobs=request.logprobs, top_logprobs=request.top_logprobs, messages=messages,
    )  # fmt: skip


def completion_fields(request: OllamaGenerateRequest) -> dict[str, object]:
    """The body of a completion that asks for the same. Raises a 400 for images, whose places a chat template writes."""
    if request.images:
        raise bad_field("images", "a prompt that is continued as it is takes none: leave out raw and suffix")
    document = _common(request) | {"prompt": request.prompt, "suffix": request.suffix}
    # A completion without a limit is OpenAI's 16 tokens; Ollama's goes to the end.
    document.setdefault("num_predict", ALL_THAT_FITS)
    if request.logprobs:
        document["logprobs"] = request.top_logprobs or 0
    constraint = _response_format(request.format).get("response_format")
    if isinstance(constraint, dict):
        named = constraint.get("json_schema")
        schema = named["schema"] if isinstance(named, dict) else {"type": "object"}
        document["guided_json"] = schema
    return document


def _common(request: OllamaRequest) -> dict[str, object]:
    options: Mapping[str, object] = {
        key: value for key, value in request.options.items() if value is not None
    }
    return {**options, "model": request.model, "stream": request.stream}


def _response_format(format_: str | dict[str, object] | None) -> dict[str, object]:
    if not format_:
        return {}
    if isinstance(format_, dict):
        named = {"name": "format", "schema": format_, "strict": False}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if format_ != "json":
        raise bad_field("format", 'must be "json" or a JSON schema')
    return {"response_format": {"type": "json_object"}}


class _CallIds:
    """Ids for calls that have none; a result belongs to the oldest open call of its tool's name."""

    def __init__(self) -> None:
        self._made = 0
        self._open: OrderedDict[int, str] = OrderedDict()
        self._named: defaultdict[str, deque[int]] = defaultdict(deque)

    def of_call(self, call: OllamaCall) -> str:
        """The id of a call."""
        self._made += 1
        id_ = call.id or f"call_{self._made}"
        self._open[self._made] = id_
        self._named[call.function.name].append(self._made)
        return id_

    def of_result(self, message: OllamaMessage) -> str:
        """The id of the call that a tool's message answers."""
        if message.tool_call_id:
            return message.tool_call_id
        named = self._named[message.tool_name or ""]
        # Calls that results without a name have answered already.
        while named and named[0] not in self._open:
            named.popleft()
        if named:
            return self._open.pop(named.popleft())
        return self._open.popitem(last=False)[1] if self._open else ""


def _message(message: OllamaMessage, ids: _CallIds) -> dict[str, object]:
    document: dict[str, object] = {"role": message.role, "content": message.content or ""}
    if message.images:
        text = [{"type": "text", "text": message.content}] if message.content else []
        document["content"] = text + [{"type": "image_url", "image_url": image} for image in message.images]
    if message.role == "tool":
        document["tool_call_id"] = ids.of_result(message)
    if message.role == "assistant":
        if message.thinking:
            document["reasoning_content"] = message.thinking
        if message.tool_calls:
            document["tool_calls"] = [
                {
                    "id": ids.of_call(call),
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
    return document
