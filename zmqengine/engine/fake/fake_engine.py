"""An engine without a model: deterministic tokens, and faults on demand.

For tests of the worker and for authors of front-ends. It follows `interface.Engine` to the letter, except
that it has no probabilities: sampling fields other than the seed do not change its tokens. A bound on reasoning does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zmqengine.engine.fake.fake_faults import EXIT_CODE, FakeEngineError, FakeFault, FakeFaults
from zmqengine.engine.fake.fake_prompt_cache import FakePromptCache, Tokens
from zmqengine.engine.fake.fake_vectors import FakeTexts
from zmqengine.engine.interface import (
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowDraft,
    RowFailure,
    RowPrefill,
    RowRequest,
    RowToken,
    StepResult,
    TextsRequest,
    TokenLogprobs,
)
from zmqengine.engine.seeds import mix, seed_key
from zmqengine.vision_card import VisionCard

if TYPE_CHECKING:
    from zmqengine.engine.adapter_files import AdapterFiles
    from zmqengine.engine.disk_cache import DiskCache

FAKE_CARD = VisionCard(
    kind="fake",
    patch=4,
    merge=2,
    resize="area",
    placeholder=257,
    token=257,
    pixels_min=64,
    pixels_max=256 * 64,
    begin=[258],
    end=[259],
)
"""Card of a fake engine that sees. Its ids are words of the fake tokenizer."""

__all__ = [
    "EXIT_CODE",
    "FAKE_CARD",
    "FakeCall",
    "FakeEngine",
    "FakeEngineConfig",
    "FakeEngineError",
    "FakeFault",
    "expected_tokens",
]


class FakeEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a fake engine. Every field has a default that suits a quick test.

    Tokens are 1 to vocab_size - 1; token 0 ends the output and is made only at `eos_index`, if that is given.
    `prefill_chunk` tokens of prompt are read a step, all rows together. `step_ms` is slept in every step that
    has work. With `instant`, a row reads its prompt and makes its whole output in the first step after insert.

    Memory is counted and not held: `kv_bytes_token` for each token of a row, and as much for each token in the
    prompt cache, which keeps at most `prompt_cache_bytes` of ended and parked rows. A model of 8 billion
    parameters has about 147,000 bytes a token.

    With `vision` it sees: its tokens depend on the contents of images, each of which takes a step of its own before its
    row begins, once in a scope. They depend on the adapter of a row, too, which is one of `adapters`. With `keeps`
    rows may read a share of their prompt, its last tokens, on which the output depends then.

    With `dimensions` it makes embeddings and with `labels` scores, of `prefill_chunk` tokens of text a step; one that
    does not generate is a `FakeVectorEngine`.
    """

    name: str = "fake"
    vocab_size: int = 1000
    context_tokens: int = 4096
    rows_max: int = 32
    prefill_chunk: int = 512
    step_ms: float = 0.0
    eos_index: int | None = None
    instant: bool = False
    kv_bytes_token: int = 1024
    prompt_cache_bytes: int = 0
    parameter_bytes: int = 0
    generates: bool = True
    dimensions: int = 0
    labels: int = 0
    vision: bool = False
    adapters: tuple[str, ...] = ()
    keeps: bool = False
    faults: tuple[FakeFault, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> FakeEngineConfig:
        """The configuration in `text`. Raises msgspec.ValidationError or DecodeError, naming what is wrong."""
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        return msgspec.json.encode(self).decode()

    def model_info(self) -> ModelInfo:
        """Facts about the model that is not there."""
        return ModelInfo(
            name=self.name,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            eos_token_ids=frozenset({0}),
            parameter_bytes=self.parameter_bytes,
            generates=self.generates,
            dimensions=self.dimensions,
            labels=self.labels,
            vision=FAKE_CARD if self.vision else None,
            image_patches_max=FAKE_CARD.patches_max if self.vision else 0,
            adapters={name: name for name in self.adapters},
            prefill_keep=self.keeps,
        )


class FakeCall(NamedTuple):
    """One call of an engine method: which, on which thread (`threading.get_ident`), with which rows."""

    method: str
    thread: int
    rows: tuple[int, ...]

    @classmethod
    def here(cls, method: str, rows: Iterable[int]) -> FakeCall:
        """A call on this thread."""
        return cls(method, threading.get_ident(), tuple(rows))


def expected_tokens(request: RowRequest, config: FakeEngineConfig | None = None) -> list[int]:
    """The whole output, `emitted` included, that a fake engine of this configuration makes for `request`."""
    config = config or FakeEngineConfig()
    row = _Row(request)
    output = list(request.emitted)
    while len(output) < _output_max(request, config):
        output.append(row.next_token(len(output), config))
        if output[-1] in request.stop_token_ids and len(output) > len(request.forced):
            break
    return output


class FakeEngine:
    """An `Engine` whose token at output index i depends only on (prompt, seed, i), and on a bound on reasoning.

    So a row that is resumed with `emitted` continues with the same tokens, whatever other rows are in the batch.
    `calls` holds the last 20,000 calls.
    """

    def __init__(self, config: FakeEngineConfig | None = None) -> None:
        self.config = config or FakeEngineConfig()
        self.info = self.config.model_info()
        self._adapters: dict[str, AdapterFiles] = {}
        self.rows_max = self.config.rows_max
        self.step_tokens_max = 1
        self.padding_bytes_max = self.images_bytes_max = 0
        self._seen: set[tuple[str, bytes]] = set()
        self.disk: DiskCache | None = None
        self.calls: deque[FakeCall] = deque(maxlen=20_000)
        self._faults = FakeFaults(self.config.faults)
        self.unblock = self._faults.unblock
        self.closed = False
        self.memory_limit_bytes = 0
        """Last argument of `limit_memory`."""
        self.decoding_elsewhere = 0
        """Last argument of `share_device`."""
        self.lowers_clock = False
        self._rows: dict[int, _Row] = {}
        self._texts = FakeTexts(self.config.dimensions, self.config.labels)
        self._chunk = self.config.prefill_chunk
        self._prompt_cache = FakePromptCache(self.config.prompt_cache_bytes, self.config.kv_bytes_token)
        self._peak_bytes = self._cached_tokens = 0
        self._strike = self._faults.strike
        self._steps = self._prompt_tokens = self._generated_tokens = 0

    @property
    def row_ids(self) -> set[int]:
        """The rows it holds, for tests."""
        return {*self._rows, *self._texts.rows}

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows; rows over `rows_max` and repeated ids come back as failures."""
        self._record("insert", (request.row for request in requests))
        failures = []
        for request in requests:
            try:
                self._rows[request.row] = self._admit(request)
            except (ValueError, OverflowError, TypeError) as error:
                failures.append(RowFailure(request.row, str(error)))
        return failures

    def load_adapter(self, files: AdapterFiles, make_room: Callable[[int], None]) -> None:
        """An adapter takes the bytes of its arrays."""
        self._record("load_adapter", ())
        make_room(len(files.arrays))
        self._adapters[files.name] = files
        self._note_adapters()

    def unload_adapter(self, name: str) -> None:
        self._record("unload_adapter", ())
        self._adapters.pop(name, None)
        self._note_adapters(without=name)

    def _note_adapters(self, without: str = "") -> None:
        known = {name: digest for name, digest in self.info.adapters.items() if name != without}
        known |= {name: files.digest for name, files in self._adapters.items()}
        weights_bytes = self.config.parameter_bytes + sum(
            len(each.arrays) for each in self._adapters.values()
        )
        self.info = dataclasses.replace(self.info, adapters=known, parameter_bytes=weights_bytes)

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        self._record("embed", (request.row for request in requests))
        failures = []
        for request in requests:
            if len(self.row_ids) >= self.config.rows_max:
                failures.append(RowFailure(request.row, f"all {self.config.rows_max} rows are taken"))
            else:
                self._texts.add(request)
        return failures

    def next(self) -> StepResult:
        """One token for each decoding row, then one chunk of prefill."""
        self._record("next", ())
        step, self._steps = self._steps, self._steps + 1
        self._strike("next", index=step)
        for row in list(self._rows.values()):
            self._strike("next", row, step)
        if self.row_ids and self.config.step_ms:
            time.sleep(self.config.step_ms / 1000)
        result = StepResult()
        for row in [row for row in self._rows.values() if row.decoding]:
            self._decode(row, result)
        self._look()
        self._prefill(result)
        self._texts.step(self._chunk, result)
        self._count_memory()
        return result

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase."""
        rows = tuple(rows)
        self._record("remove", rows)
        for id_ in rows:
            row = self._rows.pop(id_, None)
            self._texts.remove(id_)
            self._prompt_cache.forget(id_)
            if row is not None:
                self._strike("remove", row)
                self._keep(row)

    def park(self, row: int) -> int:
        """Take a row out; it is kept if all of it fits the prompt cache."""
        self._record("park", (row,))
        self._texts.remove(row)
        parked = self._rows.pop(row, None)
        if parked is None:
            return 0
        self._strike("park", parked)
        if parked.kept:
            return 0
        return self._prompt_cache.park(row, parked.tokens, parked.reusable, parked.request.cache_scope)

    def reset(self, *, keep_prompts: bool = False) -> None:
        """Drop every row."""
        self._record("reset", self._rows)
        self._rows.clear()
        self._texts.clear()
        self._prompt_cache.clear(keep_prompts=keep_prompts)
        self._seen.clear()
        self._strike("reset")

    def shrink_chunk(self) -> int:
        """Halve `chunk`, down to 1."""
        self._record("shrink_chunk", ())
        self._chunk = max(1, self._chunk // 2)
        return self._chunk

    def project_bytes(self, tokens: int) -> int:
        """`kv_bytes_token` for each token."""
        self._record("project_bytes", ())
        return tokens * self.config.kv_bytes_token

    def limit_prompt_cache(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on, parked rows the longest."""
        self._record("limit_prompt_cache", ())
        self._strike("trim")
        return self._prompt_cache.limit(min(bytes_max, self.config.prompt_cache_bytes))

    def limit_memory(self, bytes_max: int) -> None:
        """Only noted."""
        self._record("limit_memory", ())
        self.memory_limit_bytes = bytes_max

    def trim(self, empty_bytes_max: int) -> int:
        return 0

    def share_device(self, rows_decoding: int) -> None:
        """Only noted."""
        self._record("share_device", ())
        self.decoding_elsewhere = rows_decoding

    def keep_warm(self) -> bool:
        """Whether the fake device needs it, as `lowers_clock` says."""
        self._record("keep_warm", ())
        return self.lowers_clock

    def stats(self) -> EngineStats:
        """Real counters."""
        self._record("stats", ())
        self._strike("stats")
        decoding = sum(row.decoding for row in self._rows.values())
        return EngineStats(
            rows_decoding=decoding,
            rows_prefilling=len(self._rows) - decoding,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            prompt_cache_entries=len(self._prompt_cache),
        )

    def memory(self) -> EngineMemory:
        """Memory by purpose, as if there were a model."""
        self._record("memory", ())
        self._strike("memory")
        return self._count_memory()

    def close(self) -> None:
        """Drop every row. Idempotent."""
        self._record("close", ())
        self._rows.clear()
        self.closed = True
        self._strike("close")

    def _admit(self, request: RowRequest) -> _Row:
        if request.row in self._rows:
            raise ValueError("this row is already in the engine")
        if len(self.row_ids) >= self.config.rows_max:
            raise ValueError(f"all {self.config.rows_max} rows are taken")
        row = _Row(request)
        row.check(self.config)
        if row.kept and not self.config.keeps:
            raise ValueError("prefill_keep needs a draft model")
        if self._strike("insert", row):
            raise ValueError("fake fault at insert")
        return row

    def _decode(self, row: _Row, result: StepResult) -> None:
        request, index = row.request, row.index
        if self._strike("token", row, index):
            del self._rows[request.row]
            result.failures.append(RowFailure(request.row, f"fake fault at output index {index}"))
            return
        token = row.next_token(index, self.config)
        row.index += 1
        row.tokens.append(token)
        is_forced = index < len(request.forced)
        result.forced += is_forced
        self._generated_tokens += not is_forced
        stopped = not is_forced and token in request.stop_token_ids
        full = row.index >= _output_max(request, self.config)
        logprobs = None if request.logprobs is None else row.logprobs_at(index, token, self.config)
        result.tokens.append(
            RowToken(request.row, token, logprobs, "stop" if stopped else "length" if full else None)
        )
        if index < len(request.prediction):
            # As if it had been drafted one by one.
            is_right = request.prediction[index] == token
            result.drafts.append(RowDraft(request.row, "prediction", 1, int(is_right)))
        if stopped or full:
            del self._rows[request.row]
            self._keep(row)

    def _keep(self, row: _Row) -> None:
        """Keep what a row leaves, unless it has read a part of its prompt."""
        if not row.kept:
            self._prompt_cache.store(row.tokens[: row.reusable], row.request.cache_scope)

    def _look(self) -> None:
        """Make the features of one image."""
        for row in self._rows.values():
            if not row.begun and (unseen := row.images - self._seen):
                self._seen.add(min(unseen))
                return

    def _prefill(self, result: StepResult) -> None:
        budget = self._chunk
        for row in [row for row in self._rows.values() if not row.decoding]:
            if self._strike("prefill", row):
                del self._rows[row.request.row]
                result.failures.append(RowFailure(row.request.row, "fake fault in prefill"))
                continue
            if row.images - self._seen:
                continue
            if not row.begun and (budget or self.config.instant):
                row.begun = True
                if not row.kept:
                    row.cached = row.done = self._prompt_cache.take(row.tokens, row.request.cache_scope)
                self._cached_tokens += row.cached
            taken = row.total - row.done if self.config.instant else min(row.total - row.done, budget)
            if not taken:
                break
            budget = max(0, budget - taken)
            row.done += taken
            self._prompt_tokens += taken
            result.prefills.append(RowPrefill(row.request.row, row.done, row.total, row.cached, row.kept))
            if row.request.pin and row.decoding:
                self._prompt_cache.store(row.tokens[: row.total - 1], row.request.cache_scope, is_pinned=True)
            while self.config.instant and row.request.row in self._rows:
                self._decode(row, result)

    def _count_memory(self) -> EngineMemory:
        memory = _memory(self.config, self.info, self._rows.values(), self._prompt_cache, self._peak_bytes)
        self._peak_bytes = memory.peak
        return memory

    def _record(self, method: str, rows: Iterable[int]) -> None:
        self.calls.append(FakeCall.here(method, rows))


class _Row:
    """A request and how far it has come."""

    def __init__(self, request: RowRequest) -> None:
        self.kept = 0
        if request.prefill_keep is not None:
            self.kept = math.ceil(len(request.prompt) * request.prefill_keep)
            request = dataclasses.replace(request, prompt=request.prompt[-self.kept :])
        self.request = request
        self.index = len(request.emitted)
        self.tokens: Tokens = array("Q", _named(request))
        self.images = {(request.cache_scope, image.hash) for image in request.images}
        self.total = len(self.tokens)
        self.begun = False
        self.done = self.cached = 0
        digest = hashlib.blake2b(
            self.tokens[: len(request.prompt)].tobytes(), key=request.adapter.encode()[:64], digest_size=8
        )
        self._key = int.from_bytes(digest.digest(), "little") ^ seed_key(request.seed)
        self._thinking = None if request.thinking is None else request.thinking.start(request.emitted)

    def check(self, config: FakeEngineConfig) -> None:
        """Raise ValueError for a request that the engine cannot take."""
        if not self.request.prompt:
            raise ValueError("the prompt is empty")
        if max(*self.request.prompt, *self.request.emitted, *self.request.forced, 0) >= config.vocab_size:
            raise ValueError(f"a prompt token is outside the vocabulary of {config.vocab_size}")
        if _output_max(self.request, config) <= self.index:
            raise ValueError("max_tokens leaves nothing to generate")

    @property
    def decoding(self) -> bool:
        return self.done >= self.total

    @property
    def held(self) -> int:
        return self.done + len(self.tokens) - self.total

    @property
    def reusable(self) -> int:
        """Tokens that a later row need not read: all that are held but the last one known."""
        return min(self.held, len(self.tokens) - 1)

    def next_token(self, index: int, config: FakeEngineConfig) -> int:
        """The token at an index, which is the next one of the output."""
        token, thinking = self.token_at(index, config), self._thinking
        if thinking is not None:
            if index >= len(self.request.forced):
                if thinking.only is not None:
                    token = thinking.only
                elif token == thinking.barred:
                    token = 1 + token % (config.vocab_size - 1)
            thinking.follow(token)
        return token

    def token_at(self, index: int, config: FakeEngineConfig) -> int:
        if index < len(self.request.forced):
            return self.request.forced[index]
        others = config.vocab_size - 1
        token = 0 if index == config.eos_index else 1 + mix(self._key + index) % others
        if index >= self.request.sampling.min_tokens:
            return token
        following = (1 + (token + step - 1) % others for step in range(1, others + 1))
        return next((one for one in (token, *following) if one not in self.request.stop_token_ids), token)

    def logprobs_at(self, index: int, token: int, config: FakeEngineConfig) -> TokenLogprobs:
        """Halving probabilities for the token and those after it: well-formed, and the same in every life."""
        top = [(token + place) % config.vocab_size for place in range(self.request.logprobs or 0)]
        logprob = -0.25 - (mix(self._key - index) % 100) / 1000
        return TokenLogprobs(logprob, [(id_, logprob - place * 0.6931) for place, id_ in enumerate(top)])


def _named(request: RowRequest) -> Sequence[int]:
    """The tokens of a row, those of images by their contents."""
    tokens = [*request.prompt, *request.emitted]
    if not request.images:
        return tokens
    from zmqengine.engine.image_names import named

    names: list[int] = named(tokens, request.images, FAKE_CARD.token).tolist()
    return names


def _output_max(request: RowRequest, config: FakeEngineConfig) -> int:
    """How long the output may become, `emitted` included."""
    if request.max_tokens is not None:
        return request.max_tokens
    return config.context_tokens - len(request.prompt)


def _memory(
    config: FakeEngineConfig,
    info: ModelInfo,
    rows: Iterable[_Row],
    prompt_cache: FakePromptCache,
    peak_bytes: int,
) -> EngineMemory:
    """Bytes that a model would hold, and the most that it ever held."""
    kv = sum(row.held for row in rows) * config.kv_bytes_token
    parked, prompts = prompt_cache.parked_bytes, prompt_cache.prompt_bytes
    active = info.parameter_bytes + kv + parked + prompts
    return EngineMemory(
        weights=info.parameter_bytes,
        kv=kv,
        padding=0,
        parked=parked,
        prompt_cache=prompts,
        buffers=0,
        workspace=0,
        active=active,
        peak=max(peak_bytes, active),
    )
