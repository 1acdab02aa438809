"""From what an operator asked for to the sources and the policy of an engine."""

from __future__ import annotations

from zmqengine.engine.host.backend import on_cuda, on_gpu
from zmqengine.engine.host.memory import logits_allowance, padding_allowance
from zmqengine.engine.load.loader import LoadedModel
from zmqengine.engine.load.probe import probe
from zmqengine.engine.options import Speculate
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.policy import BestWidth
from zmqengine.engine.speculation.predictions import Predictions
from zmqengine.engine.speculation.same_words import difference
from zmqengine.engine.speculation.source import DraftSource
from zmqengine.engine.speculation.speculation import Speculation
from zmqengine.engine.speculation.step_costs import StepClock, StepCosts
from zmqengine.errors import ModelLoadError


def open_speculation(
    speculate: Speculate, vocab_size: int, draft_model: DraftModel | None = None
) -> Speculation | None:
    """The sources of draft tokens for a model of `vocab_size` tokens; None where nothing is drafted.

    `auto` takes every source: grammars, predictions, n-grams and `draft_model`, if there is one; on Metal, where no
    benchmark was run, only with a draft model. `ngram` and `draft` take that source, and predictions of requests.
    """
    if speculate == "auto" and draft_model is None and on_gpu() and not on_cuda():
        return None
    sources: list[DraftSource] = []
    if speculate == "auto":
        sources.append(ForcedRuns())
    if speculate != "off":
        sources.append(Predictions())
    if speculate in ("auto", "ngram"):
        sources.append(Ngrams(vocab_size))
    if speculate in ("auto", "draft") and draft_model is not None:
        sources.append(draft_model)
    if not sources:
        return None
    costs = StepCosts()
    positions_max = logits_allowance() // (4 * vocab_size)
    policy = BestWidth(costs, positions_max)
    return Speculation(sources, policy, StepClock(costs), draft_model)


def open_draft_model(draft: LoadedModel, target: LoadedModel) -> DraftModel:
    """A loaded model that drafts for `target`.

    Raises `ModelLoadError` for one with other words, or whose rows cannot go back.
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
    )
