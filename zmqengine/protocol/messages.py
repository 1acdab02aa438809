"""Every message of protocol version 1, field by field as in SPEC.md.

Messages are frozen. Decoding checks types and bounds; what depends on the loaded model (ids against the
vocabulary, the context length) is checked by the worker. Each message names its type byte in `KIND`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from zmqengine.sampling_params import LOGIT_BIAS_MAX, Sampling
from zmqengine.sampling_params import TOKEN_ID_MAX as TOKEN_ID_MAX
from zmqengine.sampling_params import TokenId as TokenId
from zmqengine.vision_card import Grids, ImageHash
from zmqengine.vision_card import VisionCard as VisionCard

PROTOCOL_VERSION = 1
MAGIC = b"ZE1"

REQUEST_ID_CHARS_MAX = 64
LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 128
DEADLINE_MS_MAX = 86_400_000
CONSTRAINT_CHARS_MAX = 65_536
MARKER_TOKENS_MAX = 16
"""Tokens of a marker that the worker looks for in an output."""
IMAGES_MAX = 256
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Default bound of one body from a front-end. Replies of a worker may be four times as long (tokenizers)."""

TokenIndex = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
RequestId = Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
CallId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Epoch = Annotated[bytes, Meta(min_length=8, max_length=8)]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SessionSecret = Annotated[bytes, Meta(min_length=16, max_length=64)]
MaxTokens = Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)]
LogprobCount = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
DeadlineMs = Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]

WorkerState = Literal["loading", "warming", "ready", "draining", "failed"]
VectorKind = Literal["embedding", "score"]
CacheScope = Literal["session", "key", "shared"]
CacheSalt = Annotated[str, Meta(max_length=64)]
"""The name of a part of a scope; empty for the whole."""
AdapterName = Annotated[str, Meta(max_length=128)]
PrefillKeep = Annotated[float, Meta(gt=0.0, lt=1.0)]
ADAPTER_FACT = "adapter "
"""Begins the names of a status's facts that are directories of adapters."""
RequestState = Literal["queued", "running", "ended"]
Finish = Literal["stop", "length", "abort", "deadline", "error", "lease", "slow_consumer", "shutdown"]


class Message(Struct, frozen=True, omit_defaults=True):
    """A body on the wire: a msgpack map with string keys."""

    KIND: ClassVar[bytes] = b""


# --- parts -------------------------------------------------------------------------------------------------


class Constraint(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the output: `text` is a JSON schema, a regular expression or a Lark grammar, by `kind`.

    It holds from the first token on, or after the output has had the tokens of `after` in a row.
    """

    kind: Literal["json_schema", "json", "regex", "lark", "choice"]
    text: Annotated[str, Meta(max_length=CONSTRAINT_CHARS_MAX)] = ""
    choices: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=1024)] = []
    after: Annotated[list[TokenId], Meta(max_length=MARKER_TOKENS_MAX)] = []


class ThinkingMax(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A bound on reasoning: at most `tokens` tokens behind an `opener`, or an opened prompt, and before the `closer`.

    `then` follows a closer that came because of the bound. With `repeats` the opener counts wherever it comes.
    """

    tokens: Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
    closer: Annotated[list[TokenId], Meta(min_length=1, max_length=MARKER_TOKENS_MAX)]
    opener: Annotated[list[TokenId], Meta(max_length=MARKER_TOKENS_MAX)] = []
    opened: bool = False
    then: Annotated[list[TokenId], Meta(max_length=MARKER_TOKENS_MAX)] = []
    repeats: bool = False


class Limits(Struct, frozen=True):
    """Limits of the worker, checked on both sides."""

    frame_bytes_max: int
    prompt_tokens_max: int
    context_tokens_max: int
    queued_max: int
    sessions_max: int
    requests_per_session_max: int
    logprobs_max: int = LOGPROBS_MAX
    stop_token_ids_max: int = STOP_TOKEN_IDS_MAX
    logit_bias_max: int = LOGIT_BIAS_MAX
    open_max_tokens: bool = False
    """Whether an insert may leave out `max_tokens`."""
    constraints: bool = False
    """Whether an insert may have a `constraint`."""
    thinking_max: bool = False
    """Whether an insert may have a `thinking_max`."""
    cache_scope: str = ""
    """Scope of an insert without `cache_scope`. Empty: an insert may have neither `cache_scope` nor `pin`."""
    cache_salt: bool = False
    """Whether an insert, an image or an embed may have a `cache_salt`, and an embed a `cache_scope`."""
    speculation: bool = False
    """Whether an insert may have `speculate`."""
    prediction_tokens_max: int = 0
    """How long the `prediction` of an insert may be. 0: an insert may have none."""
    forced: bool = False
    """Whether an insert may have `forced` output."""
    texts_max: int = 0
    """How many texts an embed may have. 0: the model makes no vectors."""
    images_max: int = 0
    """How many images an insert may have. 0: the model sees none."""
    image_patches_max: int = 0
    """Patches of one image."""
    prefill_keep: bool = False
    """Whether an insert may have `prefill_keep`: there is a draft model that chooses tokens of a prompt."""


class ModelCard(Struct, frozen=True):
    """Facts of the model for front-ends."""

    name: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: list[int]
    tokenizer_hash: str
    parameter_bytes: int
    generates: bool = True
    """Whether it takes inserts."""
    dimensions: int = 0
    """Floats of an embedding; 0 if it makes none."""
    labels: int = 0
    """Floats of a score; 0 if it makes none."""
    adapters: list[str] = []
    """Names of the adapters that an insert may have."""


class ImageRef(Struct, frozen=True, array_like=True):
    """An image in a prompt: `prompt[at : at + tokens]` has its features and what its layout puts between them."""

    hash: ImageHash
    at: TokenIndex
    tokens: Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)]
    grids: Grids


class Progress(Struct, frozen=True):
    """Progress of start-up: a stage in words and, where it is known, a fraction from 0 to 1."""

    stage: str
    fraction: float | None = None


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probability of the token, and of the most probable: [[id, logprob], ...], best first."""

    logprob: float
    top: list[tuple[int, float]] = []


class End(Struct, frozen=True, omit_defaults=True):
    """The terminal answer of an accepted request. `code` says what kind of `error` it was, where that is known.

    It was `queue_ms` until it had a row, `prefill_ms` more until its first token, and `decode_ms` more until its end.
    `drafts` are tokens proposed and accepted, by who proposed them. `kept_tokens`: those of the prompt that the model
    has read, with `prefill_keep`.
    """

    finish: Finish
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    code: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    drafts: dict[str, tuple[int, int]] = {}
    kept_tokens: int = 0


class TokenRow(Struct, frozen=True, array_like=True):
    """New tokens of one request; `first_index` is the place of the first one in the request's output.

    The output of an embed is `vectors`, each as the bytes of its 32-bit floats, and no tokens.
    """

    request: str
    first_index: TokenIndex
    tokens: list[TokenId]
    logprobs: list[TokenLogprob] | None = None
    end: End | None = None
    vectors: list[bytes] | None = None

    @property
    def count(self) -> int:
        """Number of its tokens or vectors."""
        return len(self.tokens) + len(self.vectors or ())


class ProgressRow(Struct, frozen=True, array_like=True):
    """How far the prompt of one request is, in tokens. Never repeated: a lost one is lost."""

    request: str
    done: int
    total: int
    cached: int


class WatermarkRow(Struct, frozen=True, array_like=True):
    """The index after the last token the worker has of a request, and whether the request has ended."""

    request: str
    next_index: TokenIndex
    ended: bool


class Histogram(Struct, frozen=True):
    """`counts[i]` is of values over `bounds[i - 1]` and up to `bounds[i]`; one more count is of all above the last."""

    bounds: list[float]
    counts: list[int]
    sum: float


class SessionInfo(Struct, frozen=True, omit_defaults=True):
    """One front-end, for operators."""

    id: str
    client: str = ""
    running: int = 0
    waiting: int = 0
    held: int = 0
    unsent_tokens: int = 0
    lagging: bool = False


class RequestInfo(Struct, frozen=True, omit_defaults=True):
    """One request that has not ended, for operators. `waits_for` says what a waiting one waits for."""

    request: str
    session: str
    phase: str
    waits_for: str = ""
    age_s: float = 0.0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0


# --- commands: front-end to cmd -----------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Open a session, or take over the one that has this secret."""

    KIND = b"H"
    call: CallId
    protocol: tuple[Version, Version]
    client: Annotated[str, Meta(max_length=128)]
    session_secret: SessionSecret


class Insert(Message, frozen=True, forbid_unknown_fields=True):
    """Generate. Unknown keys are refused by name."""

    KIND = b"I"
    call: CallId
    request: RequestId
    epoch: Epoch
    prompt: Annotated[list[TokenId], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    emitted: list[TokenId] = []
    sampling: Sampling = Sampling()
    seed: Seed | None = None
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    logprobs: LogprobCount | None = None
    priority: Priority = 0
    deadline_ms: DeadlineMs | None = None
    constraint: Constraint | None = None
    thinking_max: ThinkingMax | None = None
    cache_scope: CacheScope | None = None
    cache_salt: CacheSalt = ""
    pin: bool = False
    speculate: bool = True
    prediction: list[TokenId] = []
    images: Annotated[list[ImageRef], Meta(max_length=IMAGES_MAX)] = []
    forced: list[TokenId] = []
    adapter: AdapterName = ""
    prefill_keep: PrefillKeep | None = None


class Image(Message, frozen=True, forbid_unknown_fields=True):
    """Keep an image for inserts that name it."""

    KIND = b"G"
    call: CallId
    epoch: Epoch
    hash: ImageHash
    grids: Grids
    pixels: Annotated[memoryview, Meta(min_length=1)]
    """A view of the message, which may have tens of megabytes."""
    cache_scope: CacheScope | None = None
    cache_salt: CacheSalt = ""


class Embed(Message, frozen=True, forbid_unknown_fields=True):
    """Make a vector of each text. Unknown keys are refused by name."""

    KIND = b"E"
    call: CallId
    request: RequestId
    epoch: Epoch
    texts: Annotated[list[Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    output: VectorKind = "embedding"
    second: list[TokenIndex] = []
    dimensions: Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)] | None = None
    first_index: TokenIndex = 0
    priority: Priority = 1
    deadline_ms: DeadlineMs | None = None
    cache_scope: CacheScope | None = None
    cache_salt: CacheSalt = ""


class Abort(Message, frozen=True):
    """Stop a request in whatever phase it is, even before its insert has come."""

    KIND = b"A"
    call: CallId
    request: RequestId


class Resume(Message, frozen=True):
    """Send the output of a request again from an index on."""

    KIND = b"U"
    call: CallId
    request: RequestId
    epoch: Epoch
    from_index: TokenIndex


class Ack(Message, frozen=True):
    """The terminal answers of these requests have arrived; the worker forgets them."""

    KIND = b"K"
    call: CallId
    requests: Annotated[list[RequestId], Meta(max_length=4096)]


class Bye(Message, frozen=True):
    """End the session; what it still runs is aborted."""

    KIND = b"B"
    call: CallId


class Ping(Message, frozen=True):
    """On cmd: renew the lease. On ctl: is the process alive."""

    KIND = b"P"
    call: CallId


# --- replies on cmd -----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The session is open; subscribe to `topic` and wait for `granted` before the first insert."""

    KIND = b"h"
    call: CallId
    protocol: int
    epoch: Epoch
    session: str
    topic: str
    limits: Limits
    lease_ms: int
    requests: list[WatermarkRow] = []
    grace_ms: int = 0


class Accepted(Message, frozen=True):
    """The request will get a terminal answer. `next_index` is the index of its next token."""

    KIND = b"i"
    call: CallId
    epoch: Epoch
    request: str
    next_index: int
    seed: int
    state: RequestState


class Done(Message, frozen=True):
    """An abort, ack, bye, ping or drain was carried out; an image is kept."""

    KIND = b"o"
    call: CallId
    epoch: Epoch


class Replay(Message, frozen=True):
    """The answer to a resume. With `more` the client resumes again from the index after the last token."""

    KIND = b"u"
    call: CallId
    epoch: Epoch
    row: TokenRow
    more: bool = False


class Rejected(Message, frozen=True):
    """A command was refused. For an insert this is the terminal answer.

    `wanted` are the hashes of images that the worker does not hold, with the code `image_wanted`.
    """

    KIND = b"e"
    call: CallId
    epoch: Epoch
    code: str
    message: str
    request: str | None = None
    retry_after_ms: int | None = None
    wanted: list[bytes] = []


# --- output: worker to one session's topic ------------------------------------------------------------------


class Granted(Message, frozen=True):
    """The subscription is in force: nothing published from now on is lost to a slow joiner."""

    KIND = b"g"
    epoch: Epoch
    session: str


class TokenFrame(Message, frozen=True):
    """New tokens of one session from one pass. `n` counts the session's frames from 0, to make a loss visible."""

    KIND = b"t"
    epoch: Epoch
    n: int
    rows: list[TokenRow] = []
    progress: list[ProgressRow] = []


class Watermark(Message, frozen=True):
    """About once a second: how far each request of the session is."""

    KIND = b"w"
    epoch: Epoch
    n: int
    rows: list[WatermarkRow] = []


class Fatal(Message, frozen=True):
    """The worker is about to exit."""

    KIND = b"f"
    epoch: Epoch
    message: str


# --- control: front-end to ctl ------------------------------------------------------------------------------


class Describe(Message, frozen=True):
    """Request for the identity, readiness and socket addresses of the worker."""

    KIND = b"D"
    call: CallId


class Description(Message, frozen=True):
    """`model` and `limits` are there once the model is loaded. A tcp host `*` is the host of ctl."""

    KIND = b"d"
    call: CallId
    protocol: tuple[int, int]
    version: str
    name: str
    pid: int
    epoch: Epoch
    state: WorkerState
    progress: Progress
    cmd: str
    out: str
    model: ModelCard | None = None
    limits: Limits | None = None
    message: str = ""


class GetStatus(Message, frozen=True):
    """Numbers for operators."""

    KIND = b"S"
    call: CallId


class Status(Message, frozen=True):
    """A snapshot of the worker, taken after its last pass."""

    KIND = b"s"
    call: CallId
    epoch: Epoch
    state: WorkerState
    uptime_s: float
    pass_age_ms: float
    numbers: dict[str, int | float]
    facts: dict[str, str]
    memory: dict[str, int] = {}
    histograms: dict[str, Histogram] = {}
    sessions: list[SessionInfo] = []
    requests: list[RequestInfo] = []


class GetTokenizer(Message, frozen=True):
    """Request for the tokenizer: a front-end turns text into ids and back with it."""

    KIND = b"Z"
    call: CallId


class TokenizerBundle(Message, frozen=True):
    """`tokenizer_json` is in the format of the `tokenizers` library; `hash` covers every other field."""

    KIND = b"z"
    call: CallId
    hash: str
    tokenizer_json: bytes
    chat_template: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str] = {}
    facts: dict[str, str | bool | int] = {}
    vision: VisionCard | None = None


class GetMetrics(Message, frozen=True):
    """The numbers of `status` for a Prometheus scraper."""

    KIND = b"M"
    call: CallId


class Metrics(Message, frozen=True):
    """Prometheus text exposition format, version 0.0.4."""

    KIND = b"m"
    call: CallId
    text: str


class Drain(Message, frozen=True):
    """Take no new requests, finish what runs, then exit."""

    KIND = b"Q"
    call: CallId


class EndRequest(Message, frozen=True):
    """An operator ends a request of any session, as its own front-end could with `abort`."""

    KIND = b"X"
    call: CallId
    session: Annotated[str, Meta(min_length=1, max_length=64)]
    request: RequestId


NewAdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^:=\x00-\x1f]+\Z")]


class LoadAdapter(Message, frozen=True):
    """An operator adds a LoRA adapter, from a directory of the worker's machine, for requests that name it."""

    KIND = b"J"
    call: CallId
    name: NewAdapterName
    directory: Annotated[str, Meta(pattern="^/", max_length=4096)]


class UnloadAdapter(Message, frozen=True):
    """An operator removes an adapter: at once for new requests, from memory when the last one that has it ends."""

    KIND = b"Y"
    call: CallId
    name: Annotated[str, Meta(min_length=1, max_length=128)]


Command = Hello | Insert | Image | Embed | Abort | Resume | Ack | Bye | Ping
CommandReply = Welcome | Accepted | Done | Replay | Rejected
Output = Granted | TokenFrame | Watermark | Fatal
ControlRequest = (
    Describe | Ping | GetStatus | GetTokenizer | GetMetrics | Drain | EndRequest | LoadAdapter | UnloadAdapter
)
ControlReply = Description | Done | Status | TokenizerBundle | Metrics | Rejected
