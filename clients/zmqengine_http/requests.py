"""The bodies of requests as structs: one source for the validation and for the OpenAPI document.

Bounds here are OpenAI's where it states one and the worker's elsewhere.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.protocol.messages import LOGIT_BIAS_MAX, LOGPROBS_MAX, STOP_TOKEN_IDS_MAX, TOKEN_ID_MAX
from zmqengine_http.errors import bad_field
from zmqengine_http.messages import ChatMessage, ToolDefinition

STOP_MAX = 16
N_MAX = 128

TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOP_MAX)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


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
