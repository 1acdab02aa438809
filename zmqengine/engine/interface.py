"""The contracts between the actor and an engine.

An `Engine` holds the rows of one batch and makes one token for each of them a step; it may compute vectors of texts,
too. A `VectorEngine` computes nothing else, and has no KV caches. Engines of MLX and fake ones both follow this page.
Every method is called from one thread, the one that built the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from zmqengine.sampling_params import Sampling as Sampling
from zmqengine.vision_card import VisionCard

if TYPE_CHECKING:
    from zmqengine.engine.adapter_files import AdapterFiles
    from zmqengine.engine.disk_cache import DiskCache
    from zmqengine.engine.grammar.grammar import Grammar
    from zmqengine.engine.grammar.matcher import NeverBegins
    from zmqengine.engine.grammar.thinking import ThinkingBound

EngineFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """An image in a row's prompt, checked: `prompt[at : at + tokens]` is its span, `hash` names its contents.

    `grids` are rows and columns in patches, `pixels` a byte for each colour, as SPEC.md orders them.
    """

    hash: bytes
    at: int
    tokens: int
    grids: Sequence[tuple[int, int]]
    pixels: bytes | memoryview


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row to generate. All ids were checked against the vocabulary, all numbers against their bounds.

    `prompt` and `emitted` together are prefilled. `emitted` holds output tokens of an earlier life of this request
    (before a crash or an engine reset): the next token has output index `len(emitted)`, penalties count them as output,
    and the sampling key of the token at output index i is that of (seed, i). `max_tokens` counts the whole output,
    `emitted` included, and is more than `len(emitted)`; None: until the context of the model is full. `stop_token_ids`
    already holds the model's end tokens unless the request ignores them. The stop token is the last token of the
    output; before output index `sampling.min_tokens` none is drawn, unless a grammar allows nothing else. `logprobs`:
    number of top alternatives reported with each token; None for no log-probabilities. `grammar` constrains the output:
    the row ends with `stop` when the text is complete. `thinking` bounds the tokens of its reasoning. Rows of the same
    `cache_scope` share the prefix cache; `pin` keeps the prompt's blocks from eviction. `speculate` allows several
    tokens a step; the tokens are the same without it. `prediction` is a likely output: a source of draft tokens,
    without influence on the tokens. `images` are in the order of their spans. `forced` are the first output tokens if
    they are given instead of sampled: they are prefilled with the prompt and reported like sampled ones, except those
    in `emitted`. Of these only the last one that `max_tokens` allows ends the row; `max_tokens` is at least their
    number. Their log-probabilities are the model's own, before bias and penalties. A row with a `grammar` has none.
    `adapter`: one of the model's by name, empty for none; rows of one `cache_scope` have the same. With
    `prefill_keep` the model reads about that share of the prompt, the tokens that the draft model finds important; such
    a row has no images, is not pinned, and neither reads the prefix cache nor enters it.
    """

    row: int
    prompt: Sequence[int]
    max_tokens: int | None = None
    emitted: Sequence[int] = ()
    sampling: Sampling = Sampling()
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    grammar: Grammar | NeverBegins | None = None
    thinking: ThinkingBound | None = None
    cache_scope: str = ""
    pin: bool = False
    speculate: bool = True
    prediction: Sequence[int] = ()
    images: Sequence[RowImage] = ()
    forced: Sequence[int] = ()
    adapter: str = ""
    prefill_keep: float | None = None


@dataclass(frozen=True, slots=True)
class TextsRequest:
    """A row of texts to turn into vectors, which ends after the last one. All ids and numbers were checked.

    `second[i]` is the index of the first token of text i's second part, if it is a pair, and else 0. `output` is
    `embedding` for a vector of length 1 with `dimensions` floats, or `score` for the logits of the model's head. Texts
    with the same `cache_scope` share the prefix cache with each other and with rows that generate.
    """

    row: int
    texts: Sequence[Sequence[int]]
    second: Sequence[int] = ()
    output: Literal["embedding", "score"] = "embedding"
    dimensions: int | None = None
    cache_scope: str = ""


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities after bias and penalties, before sampling; `top` is sorted, best first.

    Those of forced tokens are from before bias and penalties.
    """

    logprob: float
    top: list[tuple[int, float]]


class RowToken(NamedTuple):
    """One new output token of one row. A row with `finish` has left the batch."""

    row: int
    token: int
    logprobs: TokenLogprobs | None
    finish: EngineFinish | None


class RowPrefill(NamedTuple):
    """Progress of one row's prefill: `done` of `total` tokens, `cached` of them from the prefix cache.

    `total` is prompt, `emitted` and the rest of `forced`. `cached` is at most `total` - 1: the last token is the input
    of the first decode step, so `total` - 1 - `cached` tokens are prefilled. `kept`: tokens of a prompt that is read
    in part, all that `total` counts of it; 0 of every other prompt.
    """

    row: int
    done: int
    total: int
    cached: int
    kept: int = 0


class RowVectors(NamedTuple):
    """Vectors of the next texts of one row, in their order: an array (texts, floats) of float32.

    A row whose last text this was `is_whole` and has left the batch.
    """

    row: int
    vectors: Any
    is_whole: bool


class RowFailure(NamedTuple):
    """A row that failed. It has left the batch; the others continue.

    `code`: code of the error that the client gets, empty for `error`.
    """

    row: int
    message: str
    code: str = ""


class RowDivergence(NamedTuple):
    """A long prompt that begins like a cached one and differs from it after `shared` of its `total` tokens.

    `kept` and `came` are the first differing tokens: those in the cache and those of the prompt.
    """

    row: int
    shared: int
    total: int
    kept: list[int]
    came: list[int]


class RowDraft(NamedTuple):
    """Draft tokens that `source` proposed for one row, and the number of them that were accepted."""

    row: int
    source: str
    proposed: int
    accepted: int


@dataclass(slots=True)
class StepResult:
    """The result of one `next()`. A row whose draft tokens were accepted has several tokens, in order.

    `forced` of the tokens were given and not sampled.
    """

    tokens: list[RowToken] = field(default_factory=list)
    prefills: list[RowPrefill] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    divergences: list[RowDivergence] = field(default_factory=list)
    drafts: list[RowDraft] = field(default_factory=list)
    vectors: list[RowVectors] = field(default_factory=list)
    forced: int = 0
    aside_s: float = 0.0
    """Seconds of this step for images, and for prompts that the draft model reads."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model that requests are checked against. `context_tokens` bounds prompt + output.

    A model that is not `batchable` is served row by row: the engine's `rows_max` is 1 then. `generates`: it takes
    `RowRequest`s. `dimensions` of its embeddings and `labels` of its scores are 0 where it makes none. `vision` is None
    for a model that sees no images, `image_patches_max` what one image may have for its tower's memory.
    `adapters`: digests of their files, by name. `prefill_keep`: whether a row may have that.
    """

    name: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    parameter_bytes: int
    batchable: bool = True
    generates: bool = True
    dimensions: int = 0
    labels: int = 0
    vision: VisionCard | None = None
    image_patches_max: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    prefill_keep: bool = False

    @property
    def makes_vectors(self) -> bool:
        """Whether its engine embeds texts."""
        return bool(self.dimensions or self.labels)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Rows and cached prompts now, and counters since the engine was built."""

    rows_prefilling: int
    steps: int
    prompt_tokens: int
    rows_decoding: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_cache_entries: int = 0
    prompt_cache: Mapping[str, int] = field(default_factory=dict)
    """Further figures of the prefix cache, by name."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Figures of images, by name."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of an engine by purpose, in bytes.

    `kv`: caches of all rows, of every batch (`padding` included) and of rows in prefill. `parked` and `prompt_cache` do
    not overlap. `workspace`: an upper bound of the transient memory of the next step, for a prefill chunk and for the
    largest copy of rows' caches when they grow or a row joins. `buffers`: freed memory that the platform keeps for
    reuse. `active`: memory in use as the platform reports it, `peak` its maximum. Figures that the platform does not
    report are 0.
    """

    weights: int
    workspace: int
    buffers: int
    active: int
    peak: int
    kv: int = 0
    padding: int = 0
    parked: int = 0
    prompt_cache: int = 0
    images: int = 0
    """Features of images."""


@runtime_checkable
class Engine(Protocol):
    """One model and its batch."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        ...

    @property
    def disk(self) -> DiskCache | None:
        """The prefix cache on disk, if there is one. `close` does not close it."""
        ...

    @property
    def rows_max(self) -> int:
        """Maximum number of rows at once, in prefill and decode together."""
        ...

    @property
    def step_tokens_max(self) -> int:
        """Maximum number of tokens that one step makes for a row. A `next()` reports at most two steps."""
        ...

    @property
    def padding_bytes_max(self) -> int:
        """Maximum bytes of padding of all rows together, in addition to the `project_bytes` of each."""
        ...

    @property
    def images_bytes_max(self) -> int:
        """Maximum bytes of features of all images together."""
        ...

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows; their prefill starts in the next `next()`. Returns a failure for each row that could not be
        added."""
        ...

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        """Add rows of texts, as `VectorEngine.embed` does, if the model makes vectors.

        Between two steps such a row has the KV cache of one text at most. `park` returns 0 for it: it resumes with the
        texts that have no vector yet.
        """
        ...

    def load_adapter(self, files: AdapterFiles, make_room: Callable[[int], None]) -> None:
        """Add an adapter under a name that none has. Rows that are in the engine are computed as before.

        `make_room` is called first, with bytes that will be allocated and after the load are part of the weights or
        free again. Raises what it raises, and `ModelLoadError`; the adapters are as before then.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter that no row has."""
        ...

    def next(self) -> StepResult:
        """Make one decode step for the rows that decode, then at most one bounded chunk of prefill.

        An exception means that the batch is lost: the caller resets the engine.
        """
        ...

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase. Unknown and repeated ids are no error; one bad row never keeps another.

        The id of a parked row means that it will not resume: its caches become ordinary blocks of the prefix cache.
        """
        ...

    def park(self, row: int) -> int:
        """Preempt a row in any phase; returns the number of its tokens that need no prefill when it resumes.

        The row resumes by `insert` under another id, with its output so far as `emitted`, and makes the same tokens as
        if it had stayed. The result counts prompt and output without the last token, which every row starts from.
        Caches of parked rows are evicted after everything else in the prefix cache; the row's next RowPrefill reports
        how many are left. An unknown row gives 0 and no error.
        """
        ...

    def reset(self, *, keep_prompts: bool = False) -> None:
        """Drop every row, parked ones too, and all state of the batch. The model stays loaded; the prefix cache is
        emptied, or with `keep_prompts` holds what was computed for sure before the step that failed."""
        ...

    def shrink_chunk(self) -> int:
        """Halve the most prompt tokens of a step, after the device ran out of time or memory; returns the new bound.

        The bound has a minimum, below which only the bound in time counts. It stays until the engine is closed.
        """
        ...

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of KV cache allocated for one row of `tokens`, without padding.

        Computed from the model's real cache shapes; monotonic in `tokens`.
        """
        ...

    def limit_prompt_cache(self, bytes_max: int) -> int:
        """Bound the prefix cache to `bytes_max`, and never more than the engine was built with; returns the bytes
        freed.

        The least recently used prompts are evicted first; parked rows count, and are evicted last. After an eviction
        the platform's buffers for reuse are released as well.
        """
        ...

    def limit_memory(self, bytes_max: int) -> None:
        """Bound the platform's memory to `bytes_max` in all, as far as it can: another worker started or ended."""
        ...

    def trim(self, empty_bytes_max: int) -> int:
        """Free memory that is allocated and that no row has or will take, if it is more than this; returns the bytes of
        what is left and of copies that the next step makes, which no row's `project_bytes` counts. Waits for the device
        if it frees any."""
        ...

    def share_device(self, rows_decoding: int) -> None:
        """Shorten prefill chunks as if `rows_decoding` more rows decoded: rows of other processes wait for the device
        too."""
        ...

    def keep_warm(self) -> bool:
        """Run a tiny computation if the device lowers its clock when idle; returns False on other devices."""
        ...

    def stats(self) -> EngineStats:
        """Rows and counters. Cheap, and it does not wait for the device."""
        ...

    def memory(self) -> EngineMemory:
        """Memory in use by purpose. Cheap; does not wait for the device."""
        ...

    def close(self) -> None:
        """Free the batch and restore what the engine changed in the process (the wired limit). Idempotent."""
        ...


class VectorEngine(Protocol):
    """A model that turns texts into vectors and does nothing else: embeddings, or scores of its head."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        ...

    @property
    def rows_max(self) -> int:
        """Maximum number of rows at once."""
        ...

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        """Add rows of texts. Returns a failure for each row that could not be added."""
        ...

    def next(self, rows_elsewhere: int = 0) -> StepResult:
        """Compute a bounded batch of texts, of several rows together, or a part of one that takes longer.

        The step is short if `rows_elsewhere` decode in other processes: they wait for the device too. An exception
        means that every row has left. After a failure of the device the next batches are smaller.
        """
        ...

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows. Unknown and repeated ids are no error."""
        ...

    def close(self) -> None:
        """Drop every row. Idempotent."""
        ...

    def stats(self) -> EngineStats:
        """Rows and counters. Cheap; does not wait for the device. Rows of texts prefill."""
        ...

    def memory(self) -> EngineMemory:
        """Memory in use by purpose. Cheap; does not wait for the device."""
        ...
