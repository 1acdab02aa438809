"""Builds a speculator and a draft model from an operator's options."""

from __future__ import annotations

from zmqengine.engine.host.device_memory import logits_allowance, padding_allowance
from zmqengine.engine.kv import PLAIN, KVKernels
from zmqengine.engine.load.loader import LoadedModel
from zmqengine.engine.load.probe import probe
from zmqengine.engine.options import Speculate
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions
from zmqengine.engine.speculation.source import DraftSource
from zmqengine.engine.speculation.speculator import Speculator
from zmqengine.engine.speculation.vocabularies import difference
from zmqengine.errors import ModelLoadError


def open_speculator(
    speculate: Speculate,
    vocab_size: int,
    draft_model: DraftModel | None = None,
    *,
    by_default: bool = True,
    costs: WidthCosts | None = None,
) -> Speculator | None:
    """The speculator of a model of `vocab_size` tokens; None where nothing drafts.

    `auto` takes every source: grammars, predictions, n-grams and `draft_model`, if there is one; on a device that does
    not draft `by_default` only with a draft model. `ngram` and `draft` take that source, and predictions of requests.
    `costs`: those of an earlier start.
    """
    if speculate == "off" or (speculate == "auto" and draft_model is None and not by_default):
        return None
    lookups: list[DraftSource] = []
    if speculate == "auto":
        lookups.append(ForcedRuns())
    lookups.append(Predictions())
    if speculate in ("auto", "ngram"):
        lookups.append(Ngrams(vocab_size))
    positions_max = logits_allowance() // (4 * vocab_size)
    model = None if speculate == "ngram" else draft_model
    return Speculator(lookups, costs or WidthCosts(), model=model, positions_max=positions_max)


def open_draft_model(
    draft: LoadedModel, target: LoadedModel, draw: Draw = PLAIN_DRAW, kernels: KVKernels = PLAIN
) -> DraftModel:
    """A loaded model that drafts for `target`.

    Raises `ModelLoadError` for one with another vocabulary, or whose caches cannot be rolled back.
    """
    unlike = difference(target.tokenizer.tokenizer_json, draft.tokenizer.tokenizer_json)
    if unlike:
        raise ModelLoadError(f"{draft.info.name} cannot draft for {target.info.name}: {unlike}")
    abilities = probe(draft.model)
    if not abilities.widens:
        raise ModelLoadError(
            f"{draft.info.name} cannot draft: its caches cannot go back by some tokens (a sliding window, or a state)"
        )
    return DraftModel(
        draft.model,
        draft.info.parameter_bytes,
        abilities.shape,
        words=min(draft.info.vocab_size, target.info.vocab_size),
        padding_bytes_max=padding_allowance(draft.info.parameter_bytes),
        kernels=kernels,
        draw=draw,
    )
