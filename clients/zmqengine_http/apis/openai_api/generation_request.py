"""The request fields of both OpenAI endpoints: one source for validation, OpenAPI and the table in the docs.

Bounds are OpenAI's where it states one, the worker's elsewhere. `structured_outputs` and the `guided_*`
fields are vLLM's. Source: https://docs.vllm.ai/en/latest/features/structured_outputs.html. A grammar is in
Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from msgspec import NODEFAULT, Meta, Struct, field

from zmqengine.protocol.messages import (
    CONSTRAINT_CHARS_MAX,
    CacheScope,
    Constraint,
    DeadlineMs,
    MaxTokens,
    PrefillKeep,
    Priority,
    StopTokenIds,
)
from zmqengine.sampling_params import LOGIT_BIAS_MAX, TOKEN_ID_MAX, Bias, Sampling, SamplingOptions
from zmqengine_http.apis.openai_api.interfaces import INTERFACE_FIELDS
from zmqengine_http.generating.generation import GenerationOptions
from zmqengine_http.serving.body import ignored, reported
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model

if TYPE_CHECKING:

    class SamplingFields(Struct, frozen=True, kw_only=True):
        """The fields of `Sampling`, with bounds and defaults; a new parameter becomes a request field by
        itself."""

else:

    def _default(field: msgspec.structs.FieldInfo) -> Any:
        if field.default is not NODEFAULT:
            return field.default
        return msgspec.field(default_factory=field.default_factory)

    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(field.name, field.type, _default(field)) for field in msgspec.structs.fields(Sampling)],
        frozen=True,
        kw_only=True,
    )


def sampling_given(fields: SamplingFields) -> dict[str, Any]:
    """The sampling parameters that were given, by name; None counts as absent."""
    return {
        name: value for name in Sampling.__struct_fields__ if (value := getattr(fields, name)) is not None
    }


Text = Annotated[str, Meta(min_length=1, max_length=CONSTRAINT_CHARS_MAX)]
Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)
]


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: at most one of the fields is set."""

    json: dict[str, object] | Text | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def constraint(self, param: str) -> Constraint | None:
        """The worker's constraint, or None if no field is set. Raises a 400 for more than one."""
        asked = [
            Constraint("json_schema", _schema_text(self.json)) if self.json is not None else None,
            Constraint("regex", self.regex) if self.regex is not None else None,
            Constraint("choice", choices=self.choice) if self.choice is not None else None,
            Constraint("lark", self.grammar) if self.grammar is not None else None,
            Constraint("json") if self.json_object else None,
        ]
        constraints = [each for each in asked if each is not None]
        if len(constraints) > 1:
            raise bad_field(param, "ask for one of json, regex, choice, grammar and json_object")
        return constraints[0] if constraints else None


def _schema_text(schema: dict[str, object] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


STOP_MAX = 16
N_MAX = 128

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(max_length=1000)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOP_MAX)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage` adds a last chunk with the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints: the parameters of `Sampling`, four of them in OpenAI's form, and the
    options.

    `timings_per_token`, llama.cpp's, adds the worker's times to the usage of the whole request.
    """

    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOKEN_ID_MAX)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=LOGIT_BIAS_MAX)] = field(default_factory=dict)
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop = field(default_factory=list)
    stop_token_ids: StopTokenIds = field(default_factory=list)
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=N_MAX)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    timings_per_token: bool = False
    priority: Priority = 0
    deadline_ms: DeadlineMs | None = None
    prompt_cache_key: str | None = None
    cache_scope: CacheScope | None = None
    pin: bool = False
    prefill_keep: PrefillKeep | None = None
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    guided_json: dict[str, object] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def guided(self) -> Constraint | None:
        """The constraint of vLLM's fields, or None. Raises a 400 for more than one."""
        fields = {
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
        }
        fields_set = [name for name, value in fields.items() if value is not None]
        if self.structured_outputs is None and not fields_set:
            return None
        if len(fields_set) > 1:
            raise bad_field(fields_set[1], f"is given beside {fields_set[0]}: ask for one of them")
        ours = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ).constraint(fields_set[0] if fields_set else "")
        theirs = self.structured_outputs.constraint("structured_outputs") if self.structured_outputs else None
        if ours is not None and theirs is not None:
            raise bad_field("structured_outputs", "is given beside one of the guided fields")
        return ours or theirs

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self, *, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
        """The API-neutral options. The request must have passed `check_generation`."""
        sampling = cast(SamplingOptions, sampling_given(self))
        sampling["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        return GenerationOptions(
            sampling=sampling,
            max_tokens=max_tokens,
            logprobs=logprobs,
            seed=self.seed,
            stop=[stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop],
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            n=self.n,
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            cache_key=self.prompt_cache_key,
            cache_scope=self.cache_scope,
            pin=self.pin,
            prefill_keep=self.prefill_keep,
            constraint=self.guided,
        )


def check_context(num_ctx: int | None, model: Model) -> None:
    """Raise a 400 for a `num_ctx`, Ollama's size of the context, beyond the model's own, which always applies."""
    if num_ctx is not None and num_ctx > model.context_tokens:
        raise bad_field(
            "num_ctx", f"the worker's context is {model.context_tokens} tokens: ask for at most that"
        )


def check_generation(request: GenerationRequest) -> None:
    """Raise a 400 for constraints that the types cannot express."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "needs stream to be true")
    for key in request.logit_bias:
        if not key.isascii() or not key.isdigit() or int(key[:12]) > TOKEN_ID_MAX:
            raise bad_field("logit_bias", f"{key[:40]!r} is not a token id")


GENERATION_FIELDS = (
    *INTERFACE_FIELDS,
    reported("verbosity", "a hint, which no model here takes"),
    ignored("user", "for the caller's own records"),
    ignored("safety_identifier", "for the caller's own records"),
    ignored("metadata", "for the caller's own records"),
    reported("store", "nothing is stored", False),
    reported("service_tier", "there is one tier", "auto", "default"),
    ignored("prompt_cache_retention", "the worker decides"),
    ignored("prompt_cache_options", "the worker decides"),
)
