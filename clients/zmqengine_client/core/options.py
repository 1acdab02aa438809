"""The options of one generation: their names, their defaults, and the checks made before anything is sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

import msgspec
from msgspec import Struct

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import CacheScope, Constraint, Insert, ThinkingMax, TokenId
from zmqengine.sampling_params import Sampling, SamplingOptions
from zmqengine_client.core.constrained import take_constraint

MAX_TOKENS = 256

_SAMPLING = frozenset(Sampling.__struct_fields__)
_NO_EPOCH = bytes(8)


T = TypeVar("T", bound=Struct)


class Options(SamplingOptions, total=False):
    """Keyword options of `generate_tokens`, `generate` and `chat`, as SPEC.md defines them.

    `max_tokens` is 256 if left out, and with None the most that the context and the worker's memory allow. Without a
    `seed` the client draws one, reported as `Completion.seed`.

    At most one of these constrains the output: `schema`, a JSON schema or a type that has one (a pydantic model, a
    dataclass, a `msgspec.Struct`), which `read_object()` returns; `regex`; `choice`, a list of texts; `grammar`, in
    llguidance's form of Lark; or a `constraint`.

    `thinking_max` bounds the tokens of the reasoning, which the model has to close then: a number with `generate` and
    `chat`, and a `ThinkingMax` with the ids of the markers beside token ids.

    `cache_scope` names the share of the prefix cache that may reuse the prompt, and a `cache_salt` a part of it, unless
    it is `shared`: a front-end gives each of its own callers one. `pin` protects the prompt from
    eviction. `speculate` false turns speculative decoding off; the tokens are the same. `prediction` is a guess at the
    output, such as a file before a change, whose tokens are verified as drafts: token ids, or a text with `generate`
    and `chat`. It is cut to the worker's limit. `forced` token ids are the given beginning of the output, not sampled;
    with `logprobs` their probabilities are reported. `max_tokens` counts them. `adapter` names a LoRA adapter of the
    worker's. With `prefill_keep` the model reads about that share of the prompt, chosen by the worker's draft model:
    the first token comes sooner, and the output is another one.
    """

    max_tokens: int | None
    seed: int | None
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    logprobs: int | None
    priority: int
    deadline_ms: int | None
    cache_scope: CacheScope | None
    cache_salt: str
    pin: bool
    constraint: Constraint | None
    schema: object
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    thinking_max: int | ThinkingMax | None
    speculate: bool
    prediction: Sequence[int] | str
    forced: Sequence[int]
    adapter: str
    prefill_keep: float | None
    request_id: str | None


class RequestOptions(Struct, frozen=True, kw_only=True):
    """Checked options of one request, `seed` and `request_id` chosen."""

    request_id: str
    seed: int
    sampling: Sampling = Sampling()
    max_tokens: int | None = MAX_TOKENS
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0
    deadline_ms: int | None = None
    cache_scope: CacheScope | None = None
    cache_salt: str = ""
    pin: bool = False
    constraint: Constraint | None = None
    thinking_max: int | ThinkingMax | None = None
    speculate: bool = True
    prediction: Sequence[int] | str = ()
    forced: Sequence[int] = ()
    adapter: str = ""
    prefill_keep: float | None = None
    shape: object = None
    """The type or JSON schema given as `schema`."""


def make_options(options: Options) -> RequestOptions:
    """`options` with their defaults filled in, not yet checked. Raises TypeError for an unknown name, for more than one
    constraint, and for a `schema` that is not one.
    """
    values = cast("dict[str, object]", dict(options))
    check_names(values, Options)
    shape = values.get("schema")
    constraint = take_constraint(values)
    sampling = {name: values.pop(name) for name in _SAMPLING & values.keys()}
    # Drawn by the client, so that a resumed stream does not depend on a reply lost with the worker.
    seed, request_id = values.pop("seed", None), values.pop("request_id", None)
    if "stop_token_ids" in values:
        values["stop_token_ids"] = list(cast("Iterable[int]", values["stop_token_ids"]))
    fields = {
        "sampling": Sampling(**sampling),  # type: ignore[arg-type]
        "seed": secrets.randbits(63) if seed is None else seed,
        "request_id": secrets.token_hex(8) if request_id is None else request_id,
        "constraint": constraint,
        "shape": shape,
        **values,
    }
    return RequestOptions(**fields)  # type: ignore[arg-type]


def check_names(given: Mapping[str, object], options: type) -> None:
    """Raise TypeError for a name that is none of these options."""
    names = options.__annotations__
    unknown = given.keys() - names.keys()
    if unknown:
        raise TypeError(f"unexpected option {min(unknown)!r}; the options are {', '.join(names)}")


def insert_of(options: RequestOptions) -> Insert:
    """The insert command of these options, without the prompt and the state of the request."""
    bound = options.thinking_max
    return Insert(
        call=0,
        request=options.request_id,
        epoch=_NO_EPOCH,
        prompt=[0],
        max_tokens=options.max_tokens,
        sampling=options.sampling,
        seed=options.seed,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        priority=options.priority,
        deadline_ms=options.deadline_ms,
        cache_scope=options.cache_scope,
        cache_salt=options.cache_salt,
        pin=options.pin,
        constraint=options.constraint,
        # A number becomes a bound with the model's markers when the prompt is tokenised; until then it is only checked.
        thinking_max=ThinkingMax(bound, [0]) if isinstance(bound, int) else bound,
        speculate=options.speculate,
        prediction=[] if isinstance(options.prediction, str) else list(options.prediction),
        forced=list(options.forced),
        adapter=options.adapter,
        prefill_keep=options.prefill_keep,
    )


def check_options(options: RequestOptions) -> None:
    """Raise `BadRequest`, naming the field, for a type or range that the protocol does not allow."""
    checked_command(insert_of(options), _insert_decoder)


def checked_command(command: T, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The command as a worker would read it. Raises `BadRequest` as `check_options` does."""
    try:
        return decoder.decode(msgspec.msgpack.encode(command))
    except OverflowError:
        raise BadRequest("an integer among the options has more than 64 bits") from None
    except (msgspec.MsgspecError, TypeError, UnicodeEncodeError) as error:
        raise BadRequest(str(error)) from None


def token_ids(prompt: Sequence[int], name: str = "the prompt") -> list[int]:
    """`prompt` as a list of token ids. Raises `BadRequest` for anything else, an empty one included, by this name."""
    tolist = getattr(prompt, "tolist", None)
    if isinstance(prompt, (bytes, bytearray)):
        raise BadRequest(f"{name} is not a list of token ids: bytes are none, and a text is a str")
    try:
        ids = msgspec.convert(tolist() if tolist else list(prompt), list[TokenId])
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequest(f"{name} is not a list of token ids: {error}") from None
    if not ids:
        raise BadRequest(f"{name} is empty")
    return ids


_insert_decoder = msgspec.msgpack.Decoder(Insert)
