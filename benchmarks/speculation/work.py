"""Work to measure: a model, its requests, and sources of draft tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any

from zmqengine.engine.open import device_name, find_device, find_ops  # first: it chooses what MLX binds to

# isort: split
import msgspec

from benchmarks.speculation import echo_model
from benchmarks.speculation.edit.documents import edits
from benchmarks.speculation.edit.models import ask, load_bundled
from benchmarks.speculation.erring_source import ErringSource
from benchmarks.speculation.foreseeable import make_foreseeable
from benchmarks.speculation.headed import model as headed_model
from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.host.host_heap import keep_freed_arrays
from zmqengine.engine.interface import ModelInfo, RowRequest, Sampling
from zmqengine.engine.load.head_tensors import HeadTensors
from zmqengine.engine.load.loader import LoadedModel, evaluate, load
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.speculation.build import open_draft_model, open_speculator
from zmqengine.engine.speculation.head_drafts import HeadDrafts
from zmqengine.engine.speculation.source import DraftSource
from zmqengine.engine.speculation.speculator import Speculator
from zmqengine.errors import ConfigError
from zmqengine.pico import model_path

_PROMPT_TOKENS = 16
# As a worker's --warm-up by default.
_SECONDS_MAX = 60.0
# Nearly every token is as likely as any other. What a model says by itself comes again soon enough to be copied.
_NO_REPEATS = Sampling(temperature=100.0)

Outputs = dict[int, list[int]]
"""By the number of the row."""


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. `acceptance` is the chance of each token of `set drafts` to be right, a draft has `set_length`."""

    streams: tuple[int, ...] = (1, 8, 32)
    echo_words: int = 150
    edit_fields: int = 16
    head_tokens: int = 100
    new_tokens: int = 150
    set_tokens: int = 100
    acceptance: float = 0.7
    set_length: int = 4


@dataclass(frozen=True)
class Work:
    """`requests` are made for so many streams and a seed. `speculator` opens their speculator; `known`, if not
    None, makes its source anew of the outputs there will be. `plain` runs the engine without drafts, where `runner` has
    a head."""

    name: str
    runner: ModelRunner
    info: ModelInfo
    requests: Callable[[int, int], list[RowRequest]]
    speculator: Callable[[], Speculator | None]
    known: Callable[[Sequence[RowRequest], Outputs], DraftSource] | None = None
    plain: ModelRunner | None = None


def open_work(name: str, model: str, draft: str | None, options: SpeculationOptions) -> Work:
    """One of the works of the command line. Raises `ConfigError` for a model that does not suit it."""
    if device_name().startswith("cpu"):
        # As a worker does.
        keep_freed_arrays()
    if name == "echo":
        return _echo(options)
    if name in ("edit", "edit draft"):
        return _edit(name, options)
    if name in ("head", "sampled head"):
        return _head(name, options)
    loaded = _load(model)
    if name == "set drafts":
        return _set_drafts(loaded, options)
    if name == "draft model":
        if draft is None:
            raise ConfigError("--work 'draft model' needs --draft: a smaller model with the same tokenizer")
        return _draft_model(loaded, _load(draft), options)
    sampling = _NO_REPEATS if name == "new text" else Sampling(temperature=1.0)
    prompts = _random_prompts(loaded.info.vocab_size, options.new_tokens, sampling)
    return Work(name, _runner(loaded.model), loaded.info, prompts, _auto(loaded.info))


def _echo(options: SpeculationOptions) -> Work:
    words = options.echo_words
    model = echo_model.build(words)
    info = ModelInfo("echo", echo_model.VOCAB_SIZE, 2048, frozenset(), evaluate(model))

    def requests(streams: int, seed: int) -> list[RowRequest]:
        draw = random.Random(seed)
        texts = [echo_model.document(draw, words) for _ in range(streams)]
        return [RowRequest(row, echo_model.prompt(text), words) for row, text in enumerate(texts)]

    return Work("echo", _runner(model), info, requests, _auto(info))


def _edit(name: str, options: SpeculationOptions) -> Work:
    """Documents that the trained model has not seen, to be said with a field changed."""
    loaded = load_bundled("model")
    draft = load_bundled("draft") if name == "edit draft" else None
    draft_runner = None if draft is None else _runner(draft.model)

    def speculator() -> Speculator | None:
        if draft is None or draft_runner is None:
            return open_speculator("auto", loaded.info.vocab_size)
        return open_speculator("draft", loaded.info.vocab_size, open_draft_model(draft, draft_runner, loaded))

    def requests(streams: int, seed: int) -> list[RowRequest]:
        documents = list(islice(edits("held_out", seed, options.edit_fields), streams))
        return [asked.request for asked in ask(loaded, documents)]

    return Work(name, _runner(loaded.model), loaded.info, requests, speculator)


def _head(name: str, options: SpeculationOptions) -> Work:
    """Held-out stories and answers by pico in the shape of Qwen3.5, whose head was trained."""
    model = headed_model.build()
    told = headed_model.config()
    context = told["max_position_embeddings"]
    info = ModelInfo("headed pico", told["vocab_size"], context, frozenset(), evaluate(model))
    ops, reference = find_ops("mlx")
    head = HeadTensors(headed_model.head_tensors(model))
    runner = open_model(model, ops, reference, head=head, context_tokens=context).runner
    plain = open_model(headed_model.build(), ops, reference, context_tokens=context).runner
    assert isinstance(runner, SlotRunner), "our own code runs it"
    sampling = Sampling() if name == "head" else Sampling(temperature=0.7)

    def speculator() -> Speculator | None:
        return open_speculator("draft", info.vocab_size, HeadDrafts(runner, info.vocab_size))

    def requests(streams: int, seed: int) -> list[RowRequest]:
        return headed_model.requests(streams, seed, options.head_tokens, sampling)

    return Work(name, runner, info, requests, speculator, plain=plain)


def _set_drafts(loaded: LoadedModel, options: SpeculationOptions) -> Work:
    """The model is made to say what no rounding changes, and a source knows it."""
    make_foreseeable(loaded.model)

    def known(requests: Sequence[RowRequest], outputs: Outputs) -> DraftSource:
        by_prompt = {tuple(request.prompt): outputs[request.row] for request in requests}
        return ErringSource(by_prompt, options.acceptance, options.set_length)

    requests = _random_prompts(loaded.info.vocab_size, options.set_tokens, Sampling())
    return Work("set drafts", _runner(loaded.model), loaded.info, requests, _auto(loaded.info), known)


def _draft_model(loaded: LoadedModel, draft: LoadedModel, options: SpeculationOptions) -> Work:
    draft_runner = _runner(draft.model)
    words = min(loaded.info.vocab_size, draft.info.vocab_size)

    def speculator() -> Speculator | None:
        return open_speculator("draft", loaded.info.vocab_size, open_draft_model(draft, draft_runner, loaded))

    requests = _random_prompts(words, options.new_tokens, Sampling())
    return Work("draft model", _runner(loaded.model), loaded.info, requests, speculator)


def _auto(info: ModelInfo) -> Callable[[], Speculator | None]:
    return lambda: open_speculator("auto", info.vocab_size)


def _random_prompts(
    vocab_size: int, tokens: int, sampling: Sampling
) -> Callable[[int, int], list[RowRequest]]:
    def requests(streams: int, seed: int) -> list[RowRequest]:
        draw = random.Random(seed)
        prompts = [[draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(streams)]
        return [
            RowRequest(row, prompt, tokens, sampling=sampling, seed=row) for row, prompt in enumerate(prompts)
        ]

    return requests


def _load(model: str) -> LoadedModel:
    return load(str(model_path(model)) if model == "pico" else model)


def _runner(model: Any) -> ModelRunner:
    """As a worker opens it."""
    saved = SavedChoices(device_name(), version("mlx"))
    replays = find_device().is_gpu
    return open_model(model, *find_ops(), saved, seconds_max=_SECONDS_MAX, replays=replays).runner
