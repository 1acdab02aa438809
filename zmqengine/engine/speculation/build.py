"""Builds a speculator and a draft model from an operator's options."""

from __future__ import annotations

from zmqengine.engine.host.device_memory import logits_allowance
from zmqengine.engine.load.loader import LoadedModel
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.options import Speculate
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions
from zmqengine.engine.speculation.source import DraftSource, ModelSource
from zmqengine.engine.speculation.speculator import Speculator
from zmqengine.engine.speculation.vocabularies import difference
from zmqengine.errors import ModelLoadError


def open_speculator(
    speculate: Speculate,
    vocab_size: int,
    draft_model: ModelSource | None = None,
    *,
    by_default: bool = True,
    costs: WidthCosts | None = None,
) -> Speculator | None:
    """The speculator of a model of `vocab_size` tokens; None where nothing drafts.

    `auto` takes every source: grammars, predictions, n-grams and `draft_model`, a smaller model or the model's own
    head, if there is one; on a device that does not draft `by_default` only with such a one. `ngram` and `draft` take
    that source, and predictions of requests.
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
    loaded: LoadedModel, runner: ModelRunner, target: LoadedModel, draw: Draw = PLAIN_DRAW
) -> DraftModel:
    """The draft model of `target`. Raises ModelLoadError for another vocabulary, or where mlx-lm's code runs it."""
    unlike = difference(target.tokenizer.tokenizer_json, loaded.tokenizer.tokenizer_json)
    if unlike:
        raise ModelLoadError(f"{loaded.info.name} cannot draft for {target.info.name}: {unlike}")
    if not isinstance(runner, SlotRunner):
        raise ModelLoadError(
            f"{loaded.info.name} cannot draft: its caches cannot go back by some tokens (mlx-lm's code runs it)"
        )
    words = min(loaded.info.vocab_size, target.info.vocab_size)
    return DraftModel(runner, loaded.info.parameter_bytes, words=words, draw=draw)
