"""A drafter that looks inside its model drafts for rows that come and go, as it would for each of them alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.constrained import HOT, PERSON, Pico
from tests.support.drafters import (
    ASSISTANT,
    ASSISTED,
    BLOCK,
    CLUSTERED,
    EAGLE,
    TAPS,
    TARGET,
    Assistant,
    Block,
    Eagle,
    assistant_tensors,
    block_tensors,
    drafting_runner,
    eagle_tensors,
    right_model_and_drafter,
)
from tests.support.drafts import (
    Widths,
    accepted_share,
    come_and_go,
    converse,
    rows_of_unlike_lengths,
    sampled_rows,
)
from tests.support.engines import alone, finish, make_engine
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.head_drafts import HeadDrafts
from zmqengine.pico import model_path


class Noted(HeadDrafts):
    """A drafter whose drafts are kept, with the tokens before each."""

    seen: list[tuple[list[int], list[int]]]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts = super().draft(rows, counts)
        self.seen += [(list(row.tokens), list(draft)) for row, draft in zip(rows, drafts, strict=True)]
        return drafts


def drafting_engine(runner: SlotRunner, widths: Sequence[int], **options: Any) -> Any:
    """An engine whose only source is the drafter, in every step that draws one of these widths; 1 is none."""
    source = Noted(runner, VOCAB_SIZE)
    source.seen = []
    speculator = Widths([], widths)
    speculator.model = source
    return make_engine(runner, speculator=speculator, **options)


def with_own(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """An embedding of its own, and a norm before its product."""
    random = np.random.default_rng(9)
    embedding = random.normal(size=(VOCAB_SIZE, EAGLE["hidden_size"]))
    return {
        **tensors,
        "embed_tokens.weight": mx.array(embedding.astype(np.float32)),
        "input_norm.weight": mx.array((1 + 0.1 * random.normal(size=3 * 64)).astype(np.float32)),
    }


def all_words(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The model's vocabulary, under the names of the project speculators."""
    return {
        name.replace("midlayer.", "layers.0."): array
        for name, array in tensors.items()
        if name not in ("d2t", "t2d")
    }


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "as published": (EAGLE, dict),
    "normed residual": ({**EAGLE, "norm_before_residual": True}, with_own),
    "all words": ({**EAGLE, "draft_vocab_size": VOCAB_SIZE}, all_words),
    "block": (BLOCK, dict),
    "long block": ({**BLOCK, "block_size": 16}, dict),
    "assistant": (ASSISTANT, dict),
    "clusters of words": (CLUSTERED, dict),
    "short block": ({**BLOCK, "dflash_config": {**BLOCK["dflash_config"], "block_size": 3}}, dict),
}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (eagle_tensors, Eagle, TARGET),
    "qwen3": (block_tensors, Block, TARGET),
    "gemma4_assistant": (assistant_tensors, Assistant, ASSISTED),
}


OFTEN, SELDOM = ("as published", "block"), ("normed residual", "clusters of words")


def marks_of(form: str) -> Any:
    """Forms that differ least from another one are left to larger tiers."""
    return () if form in OFTEN else pytest.mark.slow if form in SELDOM else pytest.mark.weekly


@pytest.mark.parametrize("form", [pytest.param(form, marks=marks_of(form)) for form in FORMS])
def test_drafts_are_those_of_the_published_formula(form: str) -> None:
    """Whatever was computed of a row came in chunks, verify blocks, beside others, or with a parked row."""
    config, change = FORMS[form]
    make_tensors, kind, target = KINDS[config["model_type"]]
    model = build_model(target)
    tensors = change(make_tensors(config))
    rows = rows_of_unlike_lengths(6, 16)
    wanted = [alone(model, row) for row in rows]
    runner = drafting_runner(model, config, tensors)
    engine = drafting_engine(runner, (1, 3, 4), prefill_chunk=32, prefill_chunk_idle=32)
    run = come_and_go(engine, rows)
    assert [run.ids(row.row) for row in rows] == wanted
    seen = engine._speculator.model.seen
    assert len(seen) >= 20
    formula = kind(config, tensors, TAPS)
    expected = [formula.drafts(model, tokens, len(drafts)) for tokens, drafts in seen]
    assert [drafts for _, drafts in seen] == expected


@pytest.mark.parametrize(
    ("form", "misses"),
    [("as published", 2), ("block", 0), pytest.param("assistant", 0, marks=pytest.mark.slow)],
)
def test_a_prefix_of_the_cache_brings_what_the_drafter_keeps(form: str, misses: int) -> None:
    """A conversation of three turns. A pair at the end of a prefix is not in the cache: drafts after it may differ."""
    config, _ = FORMS[form]
    make_tensors, kind, target = KINDS[config["model_type"]]
    model, tensors = build_model(target), make_tensors(config)
    engine = drafting_engine(drafting_runner(model, config, tensors), (3,))
    converse(engine, model, 100, 8, (-1, 60, 100))
    seen, formula = engine._speculator.model.seen, kind(config, tensors, TAPS)
    differing = [tokens for tokens, drafts in seen if drafts != formula.drafts(model, tokens, len(drafts))]
    assert len(seen) >= 9
    assert len(differing) <= misses


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.9), (0.7, 0.9)])
def test_a_drafter_that_is_right_is_accepted_as_often_beside_others_as_alone(
    temperature: float, least: float
) -> None:
    """Its words are the model's in another order; draws fall on the model's tokens."""
    model, config, tensors = right_model_and_drafter()
    rows = sampled_rows(temperature)

    def share(batches: Sequence[Sequence[RowRequest]]) -> float:
        engine = drafting_engine(drafting_runner(model, config, tensors), (4,))
        return accepted_share(engine, model, batches)

    one_by_one = share([[row] for row in rows])
    assert one_by_one > least
    assert share([rows]) == pytest.approx(one_by_one, abs=0.05)


def test_rows_with_grammars_make_the_same_tokens_with_a_drafter() -> None:
    """Beside one without, all of them sampled: drafts that a grammar forbids are cut."""
    pico = Pico()
    told = json.loads((model_path() / "config.json").read_text())
    config = {**EAGLE, **told, "architectures": EAGLE["architectures"], "draft_vocab_size": 500}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    runner = drafting_runner(pico.loaded.model, config, eagle_tensors(config))
    schema = pico.grammar("json_schema", json.dumps(PERSON))
    rows = [pico.row(0, schema, sampling=HOT), pico.row(1, None, sampling=HOT), pico.row(2, schema)]
    plain, speculator = pico.engine(), Widths([], (1, 4))
    source = speculator.model = Noted(runner, pico.loaded.info.vocab_size)
    source.seen = []
    drafting = pico.engine(runner, speculator=speculator)
    for engine in (plain, drafting):
        assert engine.insert(rows) == []
    wanted, run = finish(plain), finish(drafting)
    assert run.failures == []
    assert [run.ids(row.row) for row in rows] == [wanted.ids(row.row) for row in rows]
    assert len(source.seen) >= 10
    assert {draft.row for draft in run.drafts} >= {0, 1}
